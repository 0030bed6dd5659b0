"""The fenced blocks of the pages that a reader sees, and the commands in them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from house import tree

FENCE = re.compile(r"^( *)(```|~~~)([^\n]*)\n(.*?)^ *\2[ \t]*$", re.M | re.S)
DOCS = tree.ROOT / "docs"
ENGLISH = [
    *(tree.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((DOCS / "en").rglob("*.md")),
]
"""The pages whose blocks are run; the Chinese ones hold the same blocks."""


def chinese(page: Path) -> Path | None:
    """Return the page in the other language; None where there is one language only."""
    if page == tree.ROOT / "README.md":
        return tree.ROOT / "README.zh.md"
    return DOCS / "zh" / page.relative_to(DOCS / "en") if page.is_relative_to(DOCS / "en") else None


@dataclass(frozen=True)
class Found:
    """Something on a page."""

    page: Path
    line: int

    @property
    def name(self) -> str:
        """As a reader of a failed test finds it."""
        return f"{tree.name(self.page)}:{self.line}"


@dataclass(frozen=True)
class Block(Found):
    """What stands between two fences; its line is that of the first."""

    language: str
    text: str
    number: int
    """Among the blocks of this language on its page, from 0."""


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order; one within a list is moved to the left."""
    text = page.read_text(encoding="utf-8")
    counts: dict[str, int] = {}
    found = []
    for match in FENCE.finditer(text):
        language = match[3].strip() or "text"
        number = counts.get(language, 0)
        counts[language] = number + 1
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, textwrap.dedent(match[4]), number))
    return found


def of(page: str, language: str, number: int = 0) -> str:
    """Return the text of one block: `guides/tasks.md`, `yaml`, 1 is the second YAML block of that English page."""
    (text,) = [one.text for one in blocks(DOCS / "en" / page) if (one.language, one.number) == (language, number)]
    return text


@dataclass(frozen=True)
class Command(Found):
    """A command as a reader types it, continuation lines joined."""

    text: str


def commands(block: Block) -> list[Command]:
    """Return the commands of a bash block, comments left out."""
    found: list[Command] = []
    pending = ""
    start = block.line
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        start = start if pending else number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip().removesuffix("\\")
            continue
        whole = re.sub(r"(^|\s)#.*", "", pending + line).strip()
        pending = ""
        if whole:
            found.append(Command(block.page, start, whole))
    return found


def bare(text: str) -> str:
    """Return the text of a block without comments and blank ends: what both languages must have in common."""
    lines = [re.sub(r"(^|\s)#.*", "", line).rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line)
