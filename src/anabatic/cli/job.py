"""A command that runs one job: its options come from the job's dataclass, its values go to `config.load`.

The CLI library only splits the command line and prints the help. Every value reaches `config.check` as the
text that was typed, so a flag is as strict as a recipe.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from anabatic.config import check, commands, load, template
from anabatic.config.launch import Launch
from anabatic.config.train import WithAuto
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.stopping import LISTENER
from anabatic.plan import supported

COMMON = Group("Recipe and help", sort_key=0)
TOP = Group("Job", sort_key=1)
DRY_RUN = "dry_run"
"""Name of the one option of commands that train which is no setting."""


def job_command(name: str) -> Callable[..., int]:
    """Return the function behind `anabatic NAME`, with one option for each setting of the job."""
    row = commands.get(name)
    cls = row.job_class()

    def command(*words: str, **given: Any) -> int:
        files = given.pop("config", None) or []
        dry = given.pop(DRY_RUN, None)
        for word in words:
            _not_a_recipe(name, word)
        if len(words) == 1 and given.get(row.words) and _lacks_model(cls, given, files):
            given["model"], words = check.Text(words[0]), ()  # infer MODEL --data FILE
        if words:
            given[row.words] = _worded(cls, row.words, words, given.get(row.words))
        job = load.load(name, files, tree(given))
        return _on_paper(name, job) if dry else run_job(row, job)

    common = [config_parameter(), *([_dry_run_parameter()] if row.trains else [])]
    parameters = [*_words_parameter(cls, row.words), *common, *_parameters(cls, row.short)]
    set_signature(command, parameters)
    command.__doc__ = template.class_doc(cls)
    return command


def _lacks_model(cls: type, given: dict[str, Any], files: list[str]) -> bool:
    """True where one word beside the option for rows can only be the model."""
    return check.hints(cls).get("model") is str and not (files or given.get("model") or given.get("ckpt_dir"))


def _not_a_recipe(name: str, word: str) -> None:
    """Refuse a recipe in the place of a model or of rows."""
    if word.endswith((".yaml", ".yml")) and Path(word).is_file():
        from anabatic.cli import habits

        raise habits.misplaced(word, name)


def _on_paper(name: str, job: Any) -> int:
    from anabatic.recipes import plan, precheck

    lacking = precheck.require_to_plan(name, job)
    code = plan.dry_run(job)
    for what in lacking:
        log.warn(what)
    return code


def _worded(cls: type, name: str, words: tuple[str, ...], given: Any) -> Any:
    """Return what the words without an option are for a setting: its list, or its one value."""
    texts = list(map(check.Text, words))
    if typing.get_origin(check.hints(cls)[name]) is list:
        return [*texts, *(given or [])]
    if given is not None or len(texts) > 1:
        has_out = "out" in check.hints(cls)
        hint = "give one; the folder to write follows --out" if has_out and given is None else "give one"
        raise ConfigError(f"{name} is given {len(texts) + (given is not None)} times: {', '.join(texts)}", hint)
    return texts[0]


def run_job(row: commands.Command, job: Any) -> int:
    """Run a job here, or start one process per device that run it."""
    settings = load.tree_of(job)
    if "RANK" not in os.environ:  # before torch is imported, which takes seconds
        from anabatic.recipes import precheck

        supported.require_job(settings)
        precheck.require(row.name, job)
    device = settings.get("device", {})
    nproc = device.get("nproc", 1)
    if (
        nproc > 1 or isinstance(job, WithAuto) and job.auto
    ) and "RANK" not in os.environ:  # who starts again must not be the job
        return spread(row, job, Launch(nproc=nproc))
    if row.trains:
        LISTENER.start()
    if row.trains and "RANK" not in os.environ:
        from anabatic.launch import seats

        os.environ.update(seats.alone(device, os.environ))
    code = row.recipe_function()(job)
    return int(code or 0)


def spread(row: commands.Command, job: Any, launch: Launch) -> int:
    """Run a job in the processes that `launch` asks for."""
    LISTENER.start(watches=False)  # its own processes are not there yet
    from anabatic.launch import spawn

    out = load.tree_of(job).get("out")
    return spawn.run(row.name, load.dump(job), launch, Path(out) if out else None)


def _words_parameter(cls: type, name: str) -> Iterator[inspect.Parameter]:
    """The words without an option, where the command takes some."""
    if name:
        about = template.field_docs(cls).get(name, "")
        parameter = Parameter(help=about, group=TOP, show_default=False)
        hint = Annotated[str, parameter, _Unchecked()]
        yield inspect.Parameter(name.upper(), inspect.Parameter.VAR_POSITIONAL, annotation=hint)


def set_signature(command: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Give a `*words, **kwargs` function the `parameters` that the CLI library is to see."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}


def config_parameter() -> inspect.Parameter:
    """`-c FILE`, as often as wanted."""
    about = "Recipe (YAML); later files override earlier ones, options override files."
    parameter = Parameter(
        name=("--config", "-c"), help=about, group=COMMON, negative=(), converter=texts, show_default=False
    )
    return keyword("config", list[str], parameter)


def _dry_run_parameter() -> inspect.Parameter:
    about = "Print the plan of this job on this machine, its memory and time, and do not train; 1: it does not fit."
    parameter = Parameter(name="--dry-run", help=about, group=COMMON, negative=(), show_default=False)
    return keyword(DRY_RUN, bool, parameter)


def keyword(name: str, hint: Any, parameter: Parameter) -> inspect.Parameter:
    """Return one keyword-only parameter that is absent unless given."""
    annotation = Annotated[hint, parameter, _Unchecked()]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class _Unchecked:
    """Tells pydantic that values are checked elsewhere (`config.check`).

    cyclopts (5.4, `argument/_argument.py`) has pydantic check values by their annotation in every process that has
    imported pydantic, and defaults, too.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def texts(hint: Any, tokens: Any) -> Any:
    """Return what was typed, unread: a list of texts for a list, one text for the rest."""
    values = [check.Text(token.value) for token in tokens]
    inner, _ = check.strip_optional(hint)
    if typing.get_origin(inner) is list:
        return [] if values == ["[]"] else values
    return values[0]


def tree(given: dict[str, Any]) -> dict[str, Any]:
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


def options(cls: type, short: dict[str, str]) -> list[inspect.Parameter]:
    """Return one option for each setting of a class without sections."""
    return list(_section(cls, load.defaults(cls), "", TOP, short))


def _parameters(cls: type, short: dict[str, str]) -> Iterator[inspect.Parameter]:
    yield from _section(cls, load.defaults(cls), "", TOP, short)
    order = 2
    for name, hint in check.hints(cls).items():
        if dataclasses.is_dataclass(hint):
            section = typing.cast(type, hint)
            about = template.class_doc(section).split("\n\n")[0]
            values = load.defaults(cls)[name]
            yield from _section(section, values, f"{name}.", Group(name, help=about, sort_key=order), short)
            order += 1


def _section(
    cls: type, values: dict[str, Any], prefix: str, group: Group, short: dict[str, str]
) -> Iterator[inspect.Parameter]:
    docs = template.field_docs(cls)
    for name, hint in check.hints(cls).items():
        if dataclasses.is_dataclass(hint):
            continue
        key = prefix + name
        option = check.Flags().option(key)
        names = (option, *short.get(key, "").split())
        if load.is_list_of_sections(hint):
            continue  # written in a recipe only
        if typing.get_origin(hint) is dict:
            hint = list[str]
        parameter = Parameter(
            name=names,
            help=docs.get(name, ""),
            group=group,
            show_default=_default_text(values[name]),
            negative=_negative(option, hint),
            consume_multiple=(1, None) if typing.get_origin(hint) is list else False,
            converter=texts,
        )
        yield keyword(key.replace(".", "__"), hint, parameter)


def _default_text(value: Any) -> Any:
    if value is None or value in ("", [], {}):
        return False
    return lambda _: str(value).lower() if isinstance(value, bool) else str(value)


def _negative(option: str, hint: Any) -> tuple[str, ...]:
    inner, _ = check.strip_optional(hint)
    if inner is not bool:
        return ()
    head, _, last = option.removeprefix("--").rpartition(".")
    return (f"--{head}.no-{last}",) if head else (f"--no-{last}",)
