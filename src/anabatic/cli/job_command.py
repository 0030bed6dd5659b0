"""Commands that run one job: the options come from the job's dataclass, the values go to `config.loading.settings`.

Values reach `config.loading.validation` as the typed text, so options are validated as strictly as recipes.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.api import job_runner
from anabatic.cli.parsing.command_line import OTHER_COMMAND, Argument, Command, Interface, Option, ParsedLine
from anabatic.config.loading import command_table, common_settings, validation
from anabatic.config.loading import settings as settings_module
from anabatic.core import log
from anabatic.core.errors import ConfigError

COMMON_GROUP = "Recipe and help"
JOB_GROUP = "Job"
CONFIG = "config"
DRY_RUN = "dry_run"
"""Name of the only option of training commands that is not a setting."""

_CONFIG_OPTION = Option(
    key=CONFIG,
    names=("--config", "-c"),
    help="Recipe (YAML) or the name of one of the package; later ones override earlier ones, options override files.",
    group=COMMON_GROUP,
    metavar="FILE",
    is_list=True,
)
_DRY_RUN_OPTION = Option(
    key=DRY_RUN,
    names=("--dry-run",),
    help="Print the plan of this job on this machine, its memory and time, and do not train; 1: it does not fit.",
    group=COMMON_GROUP,
)


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What was typed for a job.

    Attributes:
        files: recipes.
        tree: nested settings as `validation.UntypedText`.
        is_dry_run: only the plan is asked for.
        typed_names: dotted key -> its option as it was typed.
    """

    files: list[str]
    tree: dict[str, Any]
    is_dry_run: bool = False
    typed_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def load_job(self, command: str) -> Any:
        """Return the settings; messages about values name the options as they were typed."""
        return settings_module.load_job(command, self.files, self.tree, validation.OptionNamer(self.typed_names))

    def find_origins(self) -> dict[str, str]:
        """Return dotted key -> where its value comes from."""
        return settings_module.find_origins(self.files, self.tree, validation.OptionNamer(self.typed_names))


def make_job_command(name: str, show_all: bool = False) -> Command:
    """Return `anabatic NAME`, with one option per setting of the job.

    Args:
        name: name in the table of commands.
        show_all: the help lists every setting; otherwise the common ones, if the command has a list of them.
    """
    row = command_table.COMMANDS.find_row(name)

    def run(line: ParsedLine) -> int:
        options = read_job_options(name, line)
        job = options.load_job(name)
        return _print_plan(name, job) if options.is_dry_run else job_runner.run_job(row, job)

    return Command(make_job_interface(name, show_all), run)


def make_job_interface(name: str, show_all: bool = False) -> Interface:
    """Return the options and arguments of a job."""
    row = command_table.COMMANDS.find_row(name)
    cls = row.import_job_class()
    tasks = {} if show_all else common_settings.get_common_settings(name)
    options = _group_by_task(_make_job_options(cls, row.option_aliases), tasks)
    own = [_CONFIG_OPTION, *([_DRY_RUN_OPTION] if row.is_training else [])]
    return Interface(
        settings_module.class_doc(cls),
        (*own, *options),
        tuple(_make_arguments(cls, row.positional_setting)),
        {} if tasks else _describe_sections(cls),
    )


def read_job_options(name: str, line: ParsedLine) -> JobOptions:
    """Return the recipes and the settings of a command line.

    Raises:
        ConfigError: an argument is a recipe, or a setting of one value is given several times.
    """
    row = command_table.COMMANDS.find_row(name)
    cls = row.import_job_class()
    values = {key: to_untyped(value) for key, value in line.values.items()}
    files = [str(file) for file in values.pop(CONFIG, [])]
    is_dry_run = row.is_training and bool(values.pop(DRY_RUN, False))
    words = line.words
    for word in words:
        _require_not_recipe(name, word)
    if len(words) == 1 and values.get(row.positional_setting) and _needs_model_word(cls, values, files):
        values["model"], words = validation.UntypedText(words[0]), ()  # infer MODEL --data FILE
    if words:
        values[row.positional_setting] = _words_to_value(
            cls, row.positional_setting, words, values.get(row.positional_setting)
        )
    return JobOptions(files, settings_module.nest_settings(values), is_dry_run, line.typed_names)


def make_settings_command(
    cls: type, aliases: dict[str, str], description: str, run: Callable[[tuple[str, ...], dict[str, Any]], int]
) -> Command:
    """Return a command whose options are the settings of `cls`, and that takes another command after `--`.

    Args:
        cls: dataclass without sections.
        aliases: key -> further names of its option.
        description: paragraphs of the help.
        run: gets the words of the other command and the checked settings.
    """
    options = _make_section_options(cls, settings_module.default_tree(cls), "", "Options", aliases)
    argument = Argument(OTHER_COMMAND, "The command and its options, after `--`.", is_list=True)
    interface = Interface(description, tuple(options), (argument,))

    def call(line: ParsedLine) -> int:
        values = settings_module.nest_settings({key: to_untyped(value) for key, value in line.values.items()})
        return run(line.words, validation.check_section(values, cls, validation.OptionNamer()))

    return Command(interface, call)


def _needs_model_word(cls: type, options: dict[str, Any], files: list[str]) -> bool:
    """Return whether a single positional argument next to the option for rows can only be the model."""
    return validation.field_types(cls).get("model") is str and not (
        files or options.get("model") or options.get("ckpt_dir")
    )


def _require_not_recipe(name: str, arg: str) -> None:
    """Reject a recipe as positional argument."""
    if arg.endswith((".yaml", ".yml")) and Path(arg).is_file():
        from anabatic.cli.usage import usage_hints

        raise usage_hints.explain_misplaced_file(arg, name)


def _print_plan(name: str, job: Any) -> int:
    from anabatic.recipes import plan_command
    from anabatic.recipes.prechecks import jobs

    warnings = jobs.require_to_plan(name, job)
    code = plan_command.print_local_plan(job)
    for warning in warnings:
        log.warn(warning)
    return code


def _words_to_value(cls: type, name: str, args: tuple[str, ...], option_value: Any) -> Any:
    """Return the value of a setting from the positional arguments: its list, or its single value."""
    values = list(map(validation.UntypedText, args))
    if typing.get_origin(validation.field_types(cls)[name]) is list:
        return [*values, *(option_value or [])]
    if option_value is not None or len(values) > 1:
        has_out = "out" in validation.field_types(cls)
        hint = "give one; the folder to write follows --out" if has_out and option_value is None else "give one"
        raise ConfigError(
            f"{name} is given {len(values) + (option_value is not None)} times: {', '.join(values)}", hint
        )
    return values[0]


def to_untyped(value: Any) -> Any:
    """Return typed text without conversion; `[]` alone is the empty list."""
    if isinstance(value, list):
        return [] if value == ["[]"] else [validation.UntypedText(each) for each in value]
    return validation.UntypedText(value) if isinstance(value, str) else value


def _make_arguments(cls: type, name: str) -> Iterator[Argument]:
    """Yield the argument for words without an option, if the command takes any."""
    if name:
        help_text = settings_module.field_docs(cls).get(name, "")
        # The rest is reported by `_words_to_value`, which knows what a second word may be meant for.
        yield Argument(name.upper(), help_text, is_list=True, group=JOB_GROUP)


def _make_job_options(cls: type, aliases: dict[str, str]) -> Iterator[Option]:
    defaults = settings_module.default_tree(cls)
    yield from _make_section_options(cls, defaults, "", JOB_GROUP, aliases)
    for name, section in _list_sections(cls):
        yield from _make_section_options(section, defaults[name], f"{name}.", name, aliases)


def _list_sections(cls: type) -> Iterator[tuple[str, type]]:
    for name, hint in validation.field_types(cls).items():
        if dataclasses.is_dataclass(hint):
            yield name, typing.cast(type, hint)


def _describe_sections(cls: type) -> dict[str, str]:
    return {name: settings_module.class_doc(section).split("\n\n")[0] for name, section in _list_sections(cls)}


def _group_by_task(options: Iterator[Option], tasks: Mapping[str, Sequence[str]]) -> Iterator[Option]:
    """Yield the common settings first, in one group per task, and hide the others; without tasks change nothing."""
    if not tasks:
        yield from options
        return
    others = {option.key: option for option in options}
    for task, keys in tasks.items():
        for key in keys:
            yield dataclasses.replace(others.pop(key), group=task)
    for option in others.values():
        yield dataclasses.replace(option, is_hidden=True)


def _make_section_options(
    cls: type, values: dict[str, Any], prefix: str, group: str, aliases: dict[str, str]
) -> Iterator[Option]:
    docs = settings_module.field_docs(cls)
    for name, hint in validation.field_types(cls).items():
        if dataclasses.is_dataclass(hint) or settings_module.is_list_of_sections(hint):
            continue  # a section has its own group; a list of them can only be set in a recipe
        key = prefix + name
        option = validation.OptionNamer().format_key(key)
        bare, _ = validation.strip_optional(hint)
        is_list = typing.get_origin(bare) in (list, dict)
        yield Option(
            key=key,
            names=(option, *aliases.get(key, "").split()),
            help=docs.get(name, ""),
            group=group,
            metavar=_describe_value(bare),
            is_list=is_list,
            off_names=_make_off_names(option) if bare is bool else (),
            choices=_list_choices(bare),
            default=_format_default(values[name]),
        )


def _describe_value(hint: Any) -> str:
    """Return the metavar of a type; empty for a switch."""
    if typing.get_origin(hint) is list:
        (hint,) = typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        return "NAME=VALUE"
    if typing.get_origin(hint) is typing.Literal:
        return "CHOICE"
    return {bool: "", int: "INT", float: "FLOAT"}.get(hint, "STR")


def _list_choices(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is list:
        (hint,) = typing.get_args(hint)
    return tuple(map(str, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else ()


def _format_default(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _make_off_names(option: str) -> tuple[str, ...]:
    section, _, last = option.removeprefix("--").rpartition(".")
    return (f"--{section}.no-{last}",) if section else (f"--no-{last}",)
