"""Write the line of every recipe of the package that names its schema, and the schemas (git ignores them).

usage: python scripts/gen_schemas.py [--check]     --check only says whether the lines are current
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from anabatic.config.loading import json_schema, shipped_recipes

LINE = re.compile(r"\A# yaml-language-server: .*\n")


def files() -> Iterator[tuple[Path, str]]:
    """Yield each recipe and what belongs into it."""
    for recipe in shipped_recipes.RECIPES.values():
        text = LINE.sub("", recipe.path.read_text(encoding="utf-8"))
        yield recipe.path, shipped_recipes.format_schema_line(recipe) + text


def main() -> None:
    stale = [file for file, text in files() if file.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"not current: {', '.join(map(str, stale))}" if stale else 0)
    for file, text in files():
        file.write_text(text, encoding="utf-8")
    json_schema.write_schema_files()


if __name__ == "__main__":
    main()
