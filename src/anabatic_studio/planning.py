"""Checks and plans of a recipe while it is written: problems with their lines, memory and time."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from anabatic.config.loading import settings, yaml_reader
from anabatic.core.errors import AnabaticError, MultipleErrors
from anabatic.plan import output
from anabatic.recipes import plan_command
from anabatic.recipes.prechecks import jobs
from anabatic_studio import forms, pipelines, recipe_editor

_ORIGIN = "recipe"
_LOCATION = re.compile(rf"^{_ORIGIN}(?::(?P<line>\d+))?: ?")
_SETTING = re.compile(r"^[a-z_0-9]+(?:\.[a-z_0-9]+)*")


def apply_changes(text: str, changes: dict[str, Any]) -> str:
    """Return the recipe with settings changed; a value of None in `changes` removes the setting.

    Raises:
        ConfigError: a setting cannot be changed in this text.
    """
    for key, value in changes.items():
        text = recipe_editor.remove_value(text, key) if value is None else recipe_editor.set_value(text, key, value)
    return text


def check_recipe(command: str, text: str) -> dict[str, Any]:
    """Return what a recipe sets and what is wrong with it.

    Returns:
        `values`: dotted key -> value of every setting in the text; `problems`: each with `message`, `hint`, and
        `line` (from 1) and `key` where they are known; `stages`: of a pipeline, see `pipelines.check_pipeline`.
    """
    problems: list[dict[str, Any]] = []
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    stages: list[dict[str, Any]] = []
    job = None
    try:
        source = yaml_reader.parse_yaml(text, _ORIGIN)
        values = settings.flatten_settings(source.tree)
        lines = {".".join(map(str, path)): line for path, line in source.lines.items()}
        job = settings.parse_job(command, text, _ORIGIN)
    except AnabaticError as error:
        problems += _describe_errors(error)
    if job is not None:
        try:
            if command == "run":
                stages, found = pipelines.check_pipeline(job)
            else:
                found = jobs.find_problems(command, job)
        except AnabaticError as error:
            found = [error]
        problems += [row for error in found for row in _describe_errors(error)]
    _locate_problems(problems, values, lines)
    return {"values": values, "problems": problems, "out": str(getattr(job, "out", "") or ""), "stages": stages}


def plan_recipe(command: str, text: str, chip: str = plan_command.LOCAL_CHIP) -> dict[str, Any]:
    """Return the plan of a training as `anabatic plan --json` prints it, or `error` and `hint`."""
    if not any(entry["name"] == command and entry["trains"] for entry in forms.list_commands()):
        return {}
    try:
        job = settings.parse_job(command, text, _ORIGIN)
        place = plan_command.find_machine(job, chip, job.device.nproc, 1)
        return dict(output.plan_to_dict(plan_command.estimate_job(job, place)))
    except AnabaticError as error:
        (first, *_) = _describe_errors(error)
        return {"error": first["message"], "hint": first["hint"]}


def suggest_out(root: Path, name: str, taken: Collection[str] = ()) -> str:
    """Return a folder that does not exist yet: `runs/sft-3`.

    Args:
        name: of a command or a recipe.
        taken: folders of jobs that have not started.
    """
    stem = name.replace(" ", "-")
    number = 1
    while (root / f"{stem}-{number}").exists() or str(root / f"{stem}-{number}") in taken:
        number += 1
    return str(root / f"{stem}-{number}")


def _locate_problems(problems: list[dict[str, Any]], values: dict[str, Any], lines: dict[str, int]) -> None:
    """Add the setting and its line, in place, to problems that name only its value, and lines to those with a key."""
    for row in problems:
        if row["key"] not in lines and not _is_setting(row["key"]):
            row["key"] = ""  # the first word of a sentence
        if not row["key"] and row["line"] is None:
            named = [key for key, value in values.items() if _names_value(row["message"], value)]
            row["key"] = named[0] if len(named) == 1 else ""
        if row["line"] is None:
            row["line"] = lines.get(row["key"])


def _names_value(message: str, value: Any) -> bool:
    """Return True if a message is about a text value, or one of a list."""
    items = value if isinstance(value, list) else [value]
    return any(
        isinstance(item, str) and item and re.search(rf"(?<![\w./-]){re.escape(item)}(?![\w/-])", message)
        for item in items
    )


@functools.cache
def _list_settings() -> frozenset[str]:
    return frozenset(
        field["key"]
        for command in forms.FORM_COMMANDS
        for group in forms.describe_form(command)["groups"]
        for field in group["fields"]
    )


def _is_setting(word: str) -> bool:
    """Return True if a word of a message is a setting, or a section of settings, of some command."""
    return any(key == word or key.startswith(f"{word}.") for key in _list_settings())


def _describe_errors(error: AnabaticError) -> list[dict[str, Any]]:
    if isinstance(error, MultipleErrors):
        return [row for inner in error.errors for row in _describe_errors(inner)]
    message = str(error)
    match = _LOCATION.match(message)
    line = int(match["line"]) if match and match["line"] else None
    message = message[match.end() :] if match else message
    key = _SETTING.match(message)
    return [
        {
            "message": message,
            "hint": error.hint,
            "line": line,
            "key": key[0] if key and ("." in key[0] or line is not None) else "",
        }
    ]
