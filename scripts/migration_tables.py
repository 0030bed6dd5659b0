"""The tables of docs/*/guides/migration.md, from the rows that `anabatic config from-...` goes by.

They stand between `<!-- tables: transformers.model transformers.data -->` and `<!-- end -->`; scripts/gen_reference.py
writes or checks them with its own pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from anabatic.convert import peer_tables

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- tables: ([\w. ]+) -->\n).*?(<!-- end -->)", re.S)
HEADS = {"en": ("Original", "anabatic", "Notes"), "zh": ("原写法", "anabatic", "说明")}
COMMAS = {"en": ", ", "zh": "、"}
HYPHENS = ("nanochat.options",)
"""Tables whose names are options as they are typed."""


def pages() -> Iterator[tuple[Path, str]]:
    """Yield the guides with their tables as they should be."""
    for language in HEADS:
        path = ROOT / "docs" / language / "guides" / "migration.md"
        text = path.read_text(encoding="utf-8")
        yield path, filled(text, language)


def filled(text: str, language: str) -> str:
    """Return a guide with its tables as they should be."""
    return BLOCK.sub(lambda match: match[1] + block(match[2].split(), language) + match[3], text)


def block(names: list[str], language: str) -> str:
    """Return the rows of tables such as `swift.options` as one table."""
    lines = ["| " + " | ".join(HEADS[language]) + " |", "|---|---|---|"]
    for name in names:
        peer, _, table = name.partition(".")
        hyphens = "--" if name in HYPHENS else ""
        lines += [line(row, language, hyphens) for row in peer_tables.load_tables(peer).tables[table]]
    return "\n".join(["", *lines, ""]) + "\n"


def line(row: peer_tables.MappingRow, language: str, hyphens: str = "") -> str:
    """Return a row as a line of a table."""
    cells = [theirs(row, language, hyphens), here(row, language), row.note.get(language, "")]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def theirs(row: peer_tables.MappingRow, language: str, hyphens: str = "") -> str:
    """Return the left cell."""
    names = (f"`{name if name.isupper() else hyphens[: 2 if name[1:] else 1] + name}`" for name in row.theirs)
    return row.shown.get(language) or COMMAS[language].join(names)


def here(row: peer_tables.MappingRow, language: str) -> str:
    """Return the middle cell."""
    ours = (f"`anabatic {row.command}`",) if row.command else tuple(f"`{name}`" for name in row.ours)
    return row.here.get(language) or COMMAS[language].join(ours)
