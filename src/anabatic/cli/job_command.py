"""Commands that run one job: the options come from the job's dataclass, the values go to `config.loading.settings`.

The CLI library only splits the command line and prints the help. Values reach `config.loading.validation` as the
typed text, so options are validated as strictly as recipes.
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

from anabatic.config.loading import command_table, common_settings, validation
from anabatic.config.loading import settings as settings_module
from anabatic.config.sections.launch import LaunchSettings
from anabatic.config.sections.train_jobs import WithAuto
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.stop_signals import SIGNAL_LISTENER
from anabatic.plan import model_shape

COMMON_GROUP = Group("Recipe and help", sort_key=0)
JOB_GROUP = Group("Job", sort_key=1)
DRY_RUN = "dry_run"
"""Name of the only option of training commands that is not a setting."""


def __getattr__(name: str) -> Callable[..., int]:
    """Return the function of `anabatic NAME`: the CLI library gets this attribute when the command is called.

    `NAME --all` returns the same function with all settings in the help.
    """
    command = name.removesuffix(" --all")
    if command not in command_table.COMMANDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make_job_command(command, show_all=command != name)


def make_job_command(name: str, show_all: bool = False) -> Callable[..., int]:
    """Return the function of `anabatic NAME`, with one option per setting of the job.

    Args:
        name: name in the table of commands.
        show_all: the help lists every setting; otherwise the common ones, if the command has a list of them.
    """
    row = command_table.get_command(name)
    cls = row.import_job_class()

    def command(*args: str, **options: Any) -> int:
        files = options.pop("config", None) or []
        dry_run = options.pop(DRY_RUN, None)
        for arg in args:
            _require_not_recipe(name, arg)
        if len(args) == 1 and options.get(row.positional_setting) and _needs_model_word(cls, options, files):
            options["model"], args = validation.UntypedText(args[0]), ()  # infer MODEL --data FILE
        if args:
            options[row.positional_setting] = _words_to_value(
                cls, row.positional_setting, args, options.get(row.positional_setting)
            )
        job = settings_module.load_job(name, files, nest_options(options))
        return _print_plan(name, job) if dry_run else run_job(row, job)

    common = [make_config_parameter(), *([_make_dry_run_parameter()] if row.is_training else [])]
    parameters = [
        *_make_words_parameter(cls, row.positional_setting),
        *common,
        *_group_by_task(
            _make_job_parameters(cls, row.option_aliases), {} if show_all else common_settings.get_common_settings(name)
        ),
    ]
    set_signature(command, parameters)
    command.__doc__ = settings_module.class_doc(cls)
    return command


def _needs_model_word(cls: type, options: dict[str, Any], files: list[str]) -> bool:
    """Return whether a single positional argument next to the option for rows can only be the model."""
    return validation.field_types(cls).get("model") is str and not (
        files or options.get("model") or options.get("ckpt_dir")
    )


def _require_not_recipe(name: str, arg: str) -> None:
    """Reject a recipe as positional argument."""
    if arg.endswith((".yaml", ".yml")) and Path(arg).is_file():
        from anabatic.cli import usage_hints

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


def run_job(row: command_table.Command, job: Any) -> int:
    """Run a job in this process, or start one process per device."""
    settings = settings_module.job_to_dict(job)
    if "RANK" not in os.environ:  # before torch is imported, which takes seconds
        from anabatic.recipes.prechecks import jobs

        model_shape.require_supported_job(settings)
        jobs.require_valid_job(row.name, job)
    device = settings.get("device", {})
    nproc = device.get("nproc", 1)
    if (
        nproc > 1 or isinstance(job, WithAuto) and job.auto
    ) and "RANK" not in os.environ:  # the job cannot restart itself
        return launch_processes(row, job, LaunchSettings(nproc=nproc))
    if row.is_training:
        SIGNAL_LISTENER.start_listening()
    if row.is_training and "RANK" not in os.environ:
        from anabatic.launch.local import placement

        os.environ.update(placement.place_single_process(device, os.environ))
    code = row.import_recipe_function()(job)
    return int(code or 0)


def launch_processes(row: command_table.Command, job: Any, launch: LaunchSettings) -> int:
    """Run a job in the processes of `launch`."""
    SIGNAL_LISTENER.start_listening(watch=False)  # the workers are not started yet
    from anabatic.launch.local import spawn

    out = settings_module.job_to_dict(job).get("out")
    return spawn.run(row.name, settings_module.dump_job(job), launch, Path(out) if out else None)


def _make_words_parameter(cls: type, name: str) -> Iterator[inspect.Parameter]:
    """Yield the parameter of positional arguments, if the command takes any."""
    if name:
        help_text = settings_module.field_docs(cls).get(name, "")
        parameter = Parameter(help=help_text, group=JOB_GROUP, show_default=False)
        hint = Annotated[str, parameter, _SkipPydanticValidation()]
        yield inspect.Parameter(name.upper(), inspect.Parameter.VAR_POSITIONAL, annotation=hint)


def set_signature(command: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Set the signature that the CLI library sees on a `*args, **kwargs` function."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def make_config_parameter() -> inspect.Parameter:
    """Return the parameter of `-c FILE`, which can be repeated."""
    help_text = "Recipe (YAML); later files override earlier ones, options override files."
    parameter = Parameter(
        name=("--config", "-c"),
        help=help_text,
        group=COMMON_GROUP,
        negative=(),
        converter=tokens_to_text,
        show_default=False,
    )
    return make_keyword_parameter("config", list[str], parameter)


def _make_dry_run_parameter() -> inspect.Parameter:
    help_text = "Print the plan of this job on this machine, its memory and time, and do not train; 1: it does not fit."
    parameter = Parameter(name="--dry-run", help=help_text, group=COMMON_GROUP, negative=(), show_default=False)
    return make_keyword_parameter(DRY_RUN, bool, parameter)


def make_keyword_parameter(name: str, hint: Any, parameter: Parameter) -> inspect.Parameter:
    """Return a keyword-only parameter with default None."""
    annotation = Annotated[hint, parameter, _SkipPydanticValidation()]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class _SkipPydanticValidation:
    """Disables the validation by pydantic; values are validated by `config.loading.validation`.

    cyclopts (5.4, `argument/_argument.py`) lets pydantic validate values and defaults by their annotation in every
    process that has imported pydantic.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def tokens_to_text(hint: Any, tokens: Any) -> Any:
    """Return the typed text without conversion: a list of texts for a list, else one text."""
    values = [validation.UntypedText(token.value) for token in tokens]
    bare_hint, _ = validation.strip_optional(hint)
    if typing.get_origin(bare_hint) is list:
        return [] if values == ["[]"] else values
    return values[0]


def nest_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return `{"model": {"depth": 4}}` for `{"model__depth": 4}`, without options that are None."""
    result: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        *sections, last = name.split("__")
        node = result
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return result


def make_option_parameters(cls: type, short: dict[str, str]) -> list[inspect.Parameter]:
    """Return one option per setting of a class without sections."""
    return list(_make_section_parameters(cls, settings_module.default_tree(cls), "", JOB_GROUP, short))


def _make_job_parameters(cls: type, short: dict[str, str]) -> Iterator[inspect.Parameter]:
    yield from _make_section_parameters(cls, settings_module.default_tree(cls), "", JOB_GROUP, short)
    order = 2
    for name, hint in validation.field_types(cls).items():
        if dataclasses.is_dataclass(hint):
            section = typing.cast(type, hint)
            help_text = settings_module.class_doc(section).split("\n\n")[0]
            values = settings_module.default_tree(cls)[name]
            yield from _make_section_parameters(
                section, values, f"{name}.", Group(name, help=help_text, sort_key=order), short
            )
            order += 1


def _group_by_task(
    parameters: Iterator[inspect.Parameter], tasks: Mapping[str, Sequence[str]]
) -> Iterator[inspect.Parameter]:
    """Yield the common settings first, in one group per task, and hide the others; without tasks change nothing."""
    if not tasks:
        yield from parameters
        return
    others = {parameter.name: parameter for parameter in parameters}
    for order, (task, keys) in enumerate(tasks.items(), 2):
        group = Group(task, sort_key=order)
        for key in keys:
            yield _replace_option(others.pop(key.replace(".", "__")), group=group)
    for parameter in others.values():
        yield _replace_option(parameter, show=False)


def _replace_option(parameter: inspect.Parameter, **changes: Any) -> inspect.Parameter:
    hint, option, *_ = typing.get_args(parameter.annotation)
    return make_keyword_parameter(parameter.name, hint, Parameter.combine(option, Parameter(**changes)))


def _make_section_parameters(
    cls: type, values: dict[str, Any], prefix: str, group: Group, short: dict[str, str]
) -> Iterator[inspect.Parameter]:
    docs = settings_module.field_docs(cls)
    for name, hint in validation.field_types(cls).items():
        if dataclasses.is_dataclass(hint):
            continue
        key = prefix + name
        option = validation.OptionNamer().format_key(key)
        names = (option, *short.get(key, "").split())
        if settings_module.is_list_of_sections(hint):
            continue  # can only be set in a recipe
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
    bare_hint, _ = validation.strip_optional(hint)
    if bare_hint is not bool:
        return ()
    section, _, last = option.removeprefix("--").rpartition(".")
    return (f"--{section}.no-{last}",) if section else (f"--no-{last}",)
