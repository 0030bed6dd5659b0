"""Write src/anabatic/config/schemas/*.json, and the line in the recipes of the package that names their schema.

usage: python scripts/gen_schemas.py [--check]     --check only says whether the files are current
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from anabatic.config.loading import json_schema, shipped_recipes

LINE = re.compile(r"\A# yaml-language-server: .*\n")


def files() -> Iterator[tuple[Path, str]]:
    """Yield each file and what belongs into it."""
    for command, file in json_schema.list_schema_files().items():
        yield file, json_schema.render_schema(command)
    for recipe in shipped_recipes.RECIPES.values():
        text = LINE.sub("", recipe.path.read_text(encoding="utf-8"))
        yield recipe.path, shipped_recipes.format_schema_line(recipe) + text


def main() -> None:
    stale = [file for file, text in files() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"not current: {', '.join(map(str, stale))}" if stale else 0)
    for file, text in files():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
