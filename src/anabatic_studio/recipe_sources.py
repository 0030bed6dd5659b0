"""Recipes that a new job can start from: those of the package, files in known folders, and the settings of a run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, settings, shipped_recipes, yaml_reader
from anabatic.config.loading.command_package import ShippedRecipe
from anabatic.convert import file_detection
from anabatic.core.errors import ConfigError, DataError
from anabatic_studio import forms, recipe_editor

MAX_RECIPE_BYTES = 256 << 10
_SCHEMA_LINE = re.compile(r"^# yaml-language-server: \$schema=(?:.*/)?(?P<command>[a-z-]+)\.json[ \t]*\n", re.MULTILINE)


def list_shipped_recipes() -> list[dict[str, Any]]:
    """Return name, command, summary, hardware and base of each recipe of the package whose command has a form."""
    return [recipe.to_dict() for recipe in shipped_recipes.RECIPES.values() if recipe.command in forms.FORM_COMMANDS]


def read_shipped_recipe(name: str) -> dict[str, str]:
    """Return `name`, `command` and `text` of a recipe of the package; an overlay is applied to its base.

    Raises:
        ConfigError: there is no such recipe.
    """
    recipe = shipped_recipes.get_recipe(name)
    return {"name": Path(name).name, "command": recipe.command, "text": _compose_shipped_recipe(name)}


def read_recipe_file(path: Path) -> dict[str, str]:
    """Return `name`, `command` and `text` of a file.

    Raises:
        DataError: it cannot be read, is too long, or is not text.
        ConfigError: it is not a recipe of a command that has a form.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}", "choose a text file with settings") from error
    if len(data) > MAX_RECIPE_BYTES:
        raise DataError(f"{path} has more than {MAX_RECIPE_BYTES >> 10} KiB", "choose a recipe")
    command = detect_command(text)
    if not command:
        raise ConfigError(f"{path} is not a recipe of a command that the studio starts", "choose another file")
    return {"name": path.stem, "command": command, "text": _SCHEMA_LINE.sub("", text, count=1)}


def make_recipe(config: str, command: str, name: str) -> dict[str, str]:
    """Return `name`, `command` and `text` of a new job with the settings of a run; those at their default are left out.

    Args:
        config: all settings of the run, as YAML.
        command: of the run; empty: unknown.

    Raises:
        ConfigError: the settings cannot be read, or are those of no command that has a form.
    """
    if command not in forms.FORM_COMMANDS:
        command = detect_command(config)
    if not command:
        raise ConfigError(
            f"{name} has no settings of a command that the studio starts", "choose a run that has a config.yaml"
        )
    tree = yaml_reader.parse_yaml(config, "config.yaml").tree
    defaults = settings.default_tree(command_table.COMMANDS.find_row(command).import_job_class())
    return {"name": name, "command": command, "text": yaml_reader.dump_yaml(_drop_defaults(tree, defaults))}


def _drop_defaults(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _drop_defaults(value, default)
            if not value:
                continue
        elif name in defaults and value == default:
            continue
        kept[name] = value
    return kept


def detect_command(text: str) -> str:
    """Return the command of a recipe: the one that its schema line names, or the first that knows all its settings.

    Empty: there is none, or the text is not a recipe.
    """
    match = _SCHEMA_LINE.search(text)
    if match and (named := match["command"].replace("-", " ")) in forms.FORM_COMMANDS:
        return named
    try:
        tree = yaml_reader.parse_yaml(text, "recipe").tree
    except ConfigError:
        return ""
    if not tree:
        return ""
    checks: tuple[Callable[[str, dict[str, Any]], bool], ...] = (
        _has_all_settings,  # the config.yaml of a run
        file_detection.is_complete_job,
        file_detection.accepts_settings,
    )
    return next((name for accepts in checks for name in forms.FORM_COMMANDS if accepts(name, tree)), "")


def _has_all_settings(command: str, tree: dict[str, Any]) -> bool:
    defaults = settings.default_tree(command_table.COMMANDS.find_row(command).import_job_class())
    return set(settings.flatten_settings(defaults)) == set(settings.flatten_settings(tree))


@functools.cache
def _compose_shipped_recipe(name: str) -> str:
    recipe = shipped_recipes.get_recipe(name)
    text = _read_without_schema(recipe)
    return _apply_overlay(_read_without_schema(shipped_recipes.get_recipe(recipe.base)), text) if recipe.base else text


def _read_without_schema(recipe: ShippedRecipe) -> str:
    """Return the text without the line for editors, whose path is that of the package."""
    return _SCHEMA_LINE.sub("", recipe.path.read_text(encoding="utf-8"), count=1)


def _apply_overlay(base: str, overlay: str) -> str:
    """Return the base with the settings of the overlay; the comments of both stay."""
    values = settings.flatten_settings(yaml_reader.parse_yaml(overlay, "overlay").tree)
    for key, value in values.items():
        base = recipe_editor.set_value(base, key, value)
    head = [line for line in overlay.splitlines(keepends=True) if line.startswith("#")]
    return "".join(head) + base
