"""`anabatic.sft(model=..., data=...)`: one function per command of the table, with its settings as keywords.

Nothing is declared a second time: names, types, defaults and explanations are those of the settings' dataclasses.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from anabatic.api import job_runner, notebook
from anabatic.api.run import Run, open_run
from anabatic.config.loading import command_table, settings, validation
from anabatic.config.loading.command_package import Command
from anabatic.core import log
from anabatic.core.callbacks import Callback, StopTraining, require_callback, use_callbacks
from anabatic.core.errors import AnabaticError, ConfigError, Failure, MultipleErrors

_TERMINAL_COMMANDS = ("chat", "studio", "data preview", "data stats", "data check", "data tokenize")
"""Commands whose work is what they print, or a conversation in the terminal."""
_FIXED_NAMES: dict[str, Any] = {
    "Run": Run,
    "open_run": open_run,
    "run_command": None,
    "Callback": Callback,
    "StopTraining": StopTraining,
}
_PACKAGE_FOLDER = Path(__file__).resolve().parents[1]


def list_functions() -> dict[str, str]:
    """Return function name -> command: `classify_train` -> `classify train`.

    `rl` and `infer` are not among them, because packages of these names are: `run_command("rl", ...)` runs them.
    """
    names = {name.replace(" ", "_"): name for name in command_table.COMMANDS if name not in _TERMINAL_COMMANDS}
    return {name: command for name, command in names.items() if not (_PACKAGE_FOLDER / name).is_dir()}


def list_names() -> list[str]:
    """Return the names that `find_function` knows."""
    return [*_FIXED_NAMES, *list_functions()]


def find_function(name: str) -> Any:
    """Return an attribute of the package `anabatic`; None if it has none of this name."""
    functions = list_functions()
    if name == "run_command":
        return run_command
    return _FIXED_NAMES.get(name) or (make_job_function(functions[name]) if name in functions else None)


def make_job_function(command: str) -> Callable[..., Run | None]:
    """Return the function of a command. Its signature and docstring are for `help()` and editors.

    The recipes are `files` there: `export` has a setting `recipes`.

    Raises:
        ConfigError: there is no such command.
    """
    row = command_table.COMMANDS.find_row(command)
    cls = row.import_job_class()

    def call_command(*recipes: str | Path, **options: Any) -> Run | None:
        return run_command(command, *recipes, **options)

    call_command.__name__ = call_command.__qualname__ = command.replace(" ", "_")
    call_command.__module__ = "anabatic"
    call_command.__doc__ = _describe_job(row, cls)
    parameters = [inspect.Parameter("files", inspect.Parameter.VAR_POSITIONAL, annotation="str | Path")]
    for field in dataclasses.fields(cls):
        default = settings.field_default(field)
        shown: Any = {} if dataclasses.is_dataclass(default) else default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, kind, default=shown, annotation=field.type))
    result = "Run" if row.is_training else "None"
    call_command.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
    return call_command


def _describe_job(row: Command, cls: type) -> str:
    docs = settings.field_docs(cls)
    lines = [settings.class_doc(cls), "", "Args:"]
    lines += ["    *files: recipes (YAML) or names of recipes of the package; settings override them."]
    lines += [f"    {name}: {docs[name]}" for name in validation.field_types(cls) if name in docs]
    sections = [name for name, hint in validation.field_types(cls).items() if dataclasses.is_dataclass(hint)]
    if sections:
        lines += [
            "",
            f"Sections are dictionaries: {', '.join(sections)}; anabatic config show {row.name} explains them.",
        ]
    lines += ["", "Returns:", "    The run." if row.is_training else "    Nothing."]
    errors = "    UserError: a setting or a file is wrong; nothing was started.\n    Failure: the job failed."
    return "\n".join([*lines, "", "Raises:", errors])


def run_command(command: str, /, *recipes: str | Path, **options: Any) -> Run | None:
    """Check the settings, run the job to its end, and return its run; None for commands that train nothing.

    Args:
        command: name in the table of commands.
        recipes: files or names of recipes.
        options: settings: a section is a dictionary or a dataclass, `{"optim.lr": 1e-4}` is a setting inside one, and
            short names of options (`data`, `nproc`) mean what they mean on the command line. Besides, for trainings in
            one process, `callbacks`: a list of objects with the methods of `Callback`.

    Raises:
        UserError: a setting or a file is wrong.
        Failure: the job failed.
    """
    row = command_table.COMMANDS.find_row(command)
    if not log.LOGGER.handlers:
        log.setup_logging()
    try:
        given = _require_callbacks(row, options.pop("callbacks", ())) if row.is_training else []
        job = settings.load_job(command, recipes, make_tree(row, options), validation.SettingNamer())
        if given:
            _require_one_process(job)
        elif row.is_training and (show := notebook.find_display()) is not None and _trains_here(job):
            given = [notebook.NotebookProgress(show)]
        with log.keep_handlers(), use_callbacks(given):
            code = job_runner.run_job(row, job, owns_process=False)
    except AnabaticError as error:
        for each in error.errors if isinstance(error, MultipleErrors) else (error,):
            if each.hint and hasattr(error, "add_note"):  # since Python 3.11 tracebacks show it
                error.add_note(f"hint: {each.hint}")
        raise
    out = settings.job_to_dict(job).get("out")
    if code:
        raise Failure(
            f"anabatic {command} ended with exit code {code}", f"see the logs in {out}" if out else "see the log above"
        )
    return Run(out, command) if row.is_training and out else None


def _require_callbacks(row: Command, given: Any) -> list[Any]:
    callbacks = list(given) if isinstance(given, (list, tuple)) else [given]
    if texts := [one for one in callbacks if isinstance(one, str)]:
        raise ConfigError(
            f"callbacks has the text {texts[0]!r}", f'give objects; names go to log={{"callbacks": {texts!r}}}'
        )
    return [require_callback(one, getattr(one, "__name__", type(one).__name__)) for one in callbacks]


def _trains_here(job: Any) -> bool:
    """True when the training runs in this process."""
    return job.device.nproc == 1 and not getattr(job, "auto", False)


def _require_one_process(job: Any) -> None:
    """Objects cannot follow a training into other processes."""
    nproc = job.device.nproc
    if not _trains_here(job):
        what = f"device.nproc is {nproc}" if nproc > 1 else "auto is set"
        raise ConfigError(
            f"callbacks are objects of this process, and the training runs in others: {what}",
            'put the class into a file and name it: log={"callbacks": ["my_callbacks.py:MyCallback"]}',
        )


def make_tree(row: Command, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings from keywords.

    Raises:
        ConfigError: a setting is given twice.
    """
    aliases = {
        alias.lstrip("-").replace("-", "_"): key for key, names in row.option_aliases.items() for alias in names.split()
    }
    keyed: dict[str, Any] = {}
    for name, value in options.items():
        plain = _to_plain(value)
        key = aliases[name] if name in aliases and not isinstance(plain, dict) else name
        if key in keyed:
            raise ConfigError(f"{key} is given twice", "give it once")
        keyed[key] = plain
    return settings.nest_settings(keyed)


def _to_plain(value: Any) -> Any:
    """Return what a recipe would hold: dictionaries for dataclasses, text for paths, lists for tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    return [_to_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
