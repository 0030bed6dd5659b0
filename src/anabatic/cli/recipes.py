"""`anabatic recipes list|show|copy`: the recipes inside the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from anabatic.config.loading import shipped_recipes


def list_recipes(*, json_: bool = False) -> None:
    """List the recipes in the package: name, command, hardware and purpose.

    Parameters
    ----------
    json_
        Print JSON.
    """
    rows = [recipe.to_dict() for recipe in shipped_recipes.RECIPES.values()]
    sys.stdout.write(json.dumps(rows, indent=2) + "\n" if json_ else shipped_recipes.format_table())


def show(name: str, /) -> None:
    """Print a recipe in the package, with its comments.

    Parameters
    ----------
    name
        Name of the recipe, as in `anabatic recipes list`.
    """
    sys.stdout.write(shipped_recipes.get_recipe(name).path.read_text(encoding="utf-8"))


def copy(
    name: str,
    file: Path | None = None,
    /,
    *,
    force: bool = False,
) -> None:
    """Copy a recipe in the package to a file for editing.

    Parameters
    ----------
    name
        Name of the recipe, as in `anabatic recipes list`.
    file
        File or folder to write; default: NAME.yaml in the current folder.
    force
        Overwrite the file if it exists.
    """
    written = shipped_recipes.copy_recipe(name, file or Path(), force)
    sys.stdout.write(f"{written}\n")
