"""A command that runs one job: its options come from the job's dataclass, its values go to `config.load`.

The CLI library only splits the command line and prints the help. Every value reaches `config.check` as the
text that was typed, so a flag is as strict as a recipe.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from anabatic.config.loading import command_table, common_settings, recipe_template, validation
from anabatic.config.loading import settings as settings_module
from anabatic.config.sections.launch import LaunchSettings
from anabatic.config.sections.train_jobs import WithAuto
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.stop_signals import SIGNAL_LISTENER
from anabatic.plan import supported_models

COMMON_GROUP = Group("Recipe and help", sort_key=0)
JOB_GROUP = Group("Job", sort_key=1)
DRY_RUN = "dry_run"
"""Name of the one option of commands that train which is no setting."""


def __getattr__(name: str) -> Callable[..., int]:
    """Return the function behind `anabatic NAME`: the CLI library asks for it when the command is typed.

    `NAME --all` is the same function, with all of its settings in the help.
    """
    command = name.removesuffix(" --all")
    if command not in command_table.COMMANDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make_job_command(command, show_all=command != name)


def make_job_command(name: str, show_all: bool = False) -> Callable[..., int]:
    """Return the function behind `anabatic NAME`, with one option for each setting of the job.

    Args:
        name: of the table of commands.
        show_all: its help shows every setting; otherwise those that are common, where the command has a list of them.
    """
    row = command_table.get_command(name)
    cls = row.import_job_class()

    def command(*words: str, **given: Any) -> int:
        files = given.pop("config", None) or []
        dry = given.pop(DRY_RUN, None)
        for word in words:
            _require_not_recipe(name, word)
        if len(words) == 1 and given.get(row.positional_setting) and _needs_model_word(cls, given, files):
            given["model"], words = validation.UntypedText(words[0]), ()  # infer MODEL --data FILE
        if words:
            given[row.positional_setting] = _words_to_value(
                cls, row.positional_setting, words, given.get(row.positional_setting)
            )
        job = settings_module.load_job(name, files, nest_options(given))
        return _print_plan(name, job) if dry else run_job(row, job)

    common = [make_config_parameter(), *([_make_dry_run_parameter()] if row.is_training else [])]
    parameters = [
        *_make_words_parameter(cls, row.positional_setting),
        *common,
        *_group_by_task(
            _make_job_parameters(cls, row.option_aliases), {} if show_all else common_settings.get_common_settings(name)
        ),
    ]
    set_signature(command, parameters)
    command.__doc__ = recipe_template.class_doc(cls)
    return command


def _needs_model_word(cls: type, given: dict[str, Any], files: list[str]) -> bool:
    """True where one word beside the option for rows can only be the model."""
    return validation.field_types(cls).get("model") is str and not (
        files or given.get("model") or given.get("ckpt_dir")
    )


def _require_not_recipe(name: str, word: str) -> None:
    """Refuse a recipe in the place of a model or of rows."""
    if word.endswith((".yaml", ".yml")) and Path(word).is_file():
        from anabatic.cli import usage_hints

        raise usage_hints.explain_misplaced_file(word, name)


def _print_plan(name: str, job: Any) -> int:
    from anabatic.recipes import plan_command
    from anabatic.recipes.prechecks import jobs

    lacking = jobs.require_to_plan(name, job)
    code = plan_command.print_local_plan(job)
    for what in lacking:
        log.warn(what)
    return code


def _words_to_value(cls: type, name: str, words: tuple[str, ...], given: Any) -> Any:
    """Return what the words without an option are for a setting: its list, or its one value."""
    texts = list(map(validation.UntypedText, words))
    if typing.get_origin(validation.field_types(cls)[name]) is list:
        return [*texts, *(given or [])]
    if given is not None or len(texts) > 1:
        has_out = "out" in validation.field_types(cls)
        hint = "give one; the folder to write follows --out" if has_out and given is None else "give one"
        raise ConfigError(f"{name} is given {len(texts) + (given is not None)} times: {', '.join(texts)}", hint)
    return texts[0]


def run_job(row: command_table.Command, job: Any) -> int:
    """Run a job here, or start one process per device that run it."""
    settings = settings_module.job_to_dict(job)
    if "RANK" not in os.environ:  # before torch is imported, which takes seconds
        from anabatic.recipes.prechecks import jobs

        supported_models.require_supported_job(settings)
        jobs.require_valid_job(row.name, job)
    device = settings.get("device", {})
    nproc = device.get("nproc", 1)
    if (
        nproc > 1 or isinstance(job, WithAuto) and job.auto
    ) and "RANK" not in os.environ:  # who starts again must not be the job
        return launch_processes(row, job, LaunchSettings(nproc=nproc))
    if row.is_training:
        SIGNAL_LISTENER.start_listening()
    if row.is_training and "RANK" not in os.environ:
        from anabatic.launch.local import placement

        os.environ.update(placement.place_single_process(device, os.environ))
    code = row.import_recipe_function()(job)
    return int(code or 0)


def launch_processes(row: command_table.Command, job: Any, launch: LaunchSettings) -> int:
    """Run a job in the processes that `launch` asks for."""
    SIGNAL_LISTENER.start_listening(watch=False)  # its own processes are not there yet
    from anabatic.launch.local import spawn

    out = settings_module.job_to_dict(job).get("out")
    return spawn.run(row.name, settings_module.dump_job(job), launch, Path(out) if out else None)


def _make_words_parameter(cls: type, name: str) -> Iterator[inspect.Parameter]:
    """The words without an option, where the command takes some."""
    if name:
        about = recipe_template.field_docs(cls).get(name, "")
        parameter = Parameter(help=about, group=JOB_GROUP, show_default=False)
        hint = Annotated[str, parameter, _SkipPydanticValidation()]
        yield inspect.Parameter(name.upper(), inspect.Parameter.VAR_POSITIONAL, annotation=hint)


def set_signature(command: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Give a `*words, **kwargs` function the `parameters` that the CLI library is to see."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}


def make_config_parameter() -> inspect.Parameter:
    """`-c FILE`, as often as wanted."""
    about = "Recipe (YAML); later files override earlier ones, options override files."
    parameter = Parameter(
        name=("--config", "-c"),
        help=about,
        group=COMMON_GROUP,
        negative=(),
        converter=tokens_to_text,
        show_default=False,
    )
    return make_keyword_parameter("config", list[str], parameter)


def _make_dry_run_parameter() -> inspect.Parameter:
    about = "Print the plan of this job on this machine, its memory and time, and do not train; 1: it does not fit."
    parameter = Parameter(name="--dry-run", help=about, group=COMMON_GROUP, negative=(), show_default=False)
    return make_keyword_parameter(DRY_RUN, bool, parameter)


def make_keyword_parameter(name: str, hint: Any, parameter: Parameter) -> inspect.Parameter:
    """Return one keyword-only parameter that is absent unless given."""
    annotation = Annotated[hint, parameter, _SkipPydanticValidation()]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class _SkipPydanticValidation:
    """Tells pydantic that values are checked elsewhere (`config.check`).

    cyclopts (5.4, `argument/_argument.py`) has pydantic check values by their annotation in every process that has
    imported pydantic, and defaults, too.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def tokens_to_text(hint: Any, tokens: Any) -> Any:
    """Return what was typed, unread: a list of texts for a list, one text for the rest."""
    values = [validation.UntypedText(token.value) for token in tokens]
    inner, _ = validation.strip_optional(hint)
    if typing.get_origin(inner) is list:
        return [] if values == ["[]"] else values
    return values[0]


def nest_options(given: dict[str, Any]) -> dict[str, Any]:
    """`{"model__depth": 4}` -> `{"model": {"depth": 4}}`, without the options that were not given."""
    result: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        *sections, last = name.split("__")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return result


def make_option_parameters(cls: type, short: dict[str, str]) -> list[inspect.Parameter]:
    """Return one option for each setting of a class without sections."""
    return list(_make_section_parameters(cls, settings_module.default_tree(cls), "", JOB_GROUP, short))


def _make_job_parameters(cls: type, short: dict[str, str]) -> Iterator[inspect.Parameter]:
    yield from _make_section_parameters(cls, settings_module.default_tree(cls), "", JOB_GROUP, short)
    order = 2
    for name, hint in validation.field_types(cls).items():
        if dataclasses.is_dataclass(hint):
            section = typing.cast(type, hint)
            about = recipe_template.class_doc(section).split("\n\n")[0]
            values = settings_module.default_tree(cls)[name]
            yield from _make_section_parameters(
                section, values, f"{name}.", Group(name, help=about, sort_key=order), short
            )
            order += 1


def _group_by_task(
    parameters: Iterator[inspect.Parameter], tasks: Mapping[str, Sequence[str]]
) -> Iterator[inspect.Parameter]:
    """Put the common settings first, in a group for each task, and hide the others; without tasks change nothing."""
    if not tasks:
        yield from parameters
        return
    others = {one.name: one for one in parameters}
    for order, (task, keys) in enumerate(tasks.items(), 2):
        group = Group(task, sort_key=order)
        for key in keys:
            yield _replace_option(others.pop(key.replace(".", "__")), group=group)
    for one in others.values():
        yield _replace_option(one, show=False)


def _replace_option(parameter: inspect.Parameter, **changes: Any) -> inspect.Parameter:
    hint, option, *_ = typing.get_args(parameter.annotation)
    return make_keyword_parameter(parameter.name, hint, Parameter.combine(option, Parameter(**changes)))


def _make_section_parameters(
    cls: type, values: dict[str, Any], prefix: str, group: Group, short: dict[str, str]
) -> Iterator[inspect.Parameter]:
    docs = recipe_template.field_docs(cls)
    for name, hint in validation.field_types(cls).items():
        if dataclasses.is_dataclass(hint):
            continue
        key = prefix + name
        option = validation.OptionNamer().format_key(key)
        names = (option, *short.get(key, "").split())
        if settings_module.is_list_of_sections(hint):
            continue  # written in a recipe only
        if typing.get_origin(hint) is dict:
            hint = list[str]
        parameter = Parameter(
            name=names,
            help=docs.get(name, ""),
            group=group,
            show_default=_format_default(values[name]),
            negative=_negative_names(option, hint),
            consume_multiple=(1, None) if typing.get_origin(hint) is list else False,
            converter=tokens_to_text,
        )
        yield make_keyword_parameter(key.replace(".", "__"), hint, parameter)


def _format_default(value: Any) -> Any:
    if value is None or value in ("", [], {}):
        return False
    return lambda _: str(value).lower() if isinstance(value, bool) else str(value)


def _negative_names(option: str, hint: Any) -> tuple[str, ...]:
    inner, _ = validation.strip_optional(hint)
    if inner is not bool:
        return ()
    head, _, last = option.removeprefix("--").rpartition(".")
    return (f"--{head}.no-{last}",) if head else (f"--no-{last}",)
