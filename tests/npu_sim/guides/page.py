"""The page of guides for Ascend, taken apart: its commands, its rows, and what each row says is to be found here."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")
NAMES = ("trajectory", "nanochat", "32b", "vessel", "swift")
"""The chapters, in the order of the page."""
KINDS = {
    "command": r"anabatic .+",
    "option": r"--[a-z].*",
    "recipe": r"-c [\w-]+",
    "file": r"[\w-]+\.jsonl|rank-0\.log|best_model|final_model",
    "variable": r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+(=\d)?",
    "extra": r"pip install 'anabatic\[\w+\]'",
    "python": r"TrajectoryClassifier",
    "setting": r"[a-z_]+(\.[a-z0-9_]+)?",
}
"""Kind -> how a span in the middle column looks; the first that fits counts."""
SAME = {
    "the same variable": "variable",
    "the same variables": "variable",
    "the same keys": "key",
    "the same names": "file",
    "the same command": "again",
}
"""Words of the middle column that mean the spans on the left."""
NOTHING = ("none", "nothing", "see the README")
"""Words that need a reason on the right."""


@dataclass(frozen=True)
class Item:
    """One thing that a row promises: a command, a setting, a file, ..."""

    kind: str
    text: str


@dataclass(frozen=True)
class Row:
    """There, here, mind."""

    chapter: str
    theirs: str
    here: str
    mind: str

    @property
    def items(self) -> list[Item]:
        """What stands in the middle, and the commands on the right; none: the row says nothing that can be tried."""
        found = [Item(kind_of(span), span) for span in SPAN.findall(self.here)]
        kind = SAME.get(self.here, "")
        found += [Item(kind, span) for span in SPAN.findall(self.theirs) if kind]
        return found + [Item("command", span) for span in SPAN.findall(self.mind) if span.startswith("anabatic ")]

    @property
    def reason(self) -> str:
        """Why nothing is to be done; empty where something is."""
        return self.mind if self.here.partition(";")[0] in NOTHING else ""


@dataclass(frozen=True)
class Chapter:
    """The commands of a guide, as they are typed here, and its rows."""

    name: str
    lines: tuple[str, ...]
    rows: tuple[Row, ...]


def kind_of(span: str) -> str:
    """Return the kind of a span of the middle column; empty: none that is known."""
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, span)), "")


@functools.cache
def chapters(language: str = "en") -> dict[str, Chapter]:
    """Read the page."""
    text = (ROOT / "docs" / language / "guides" / "migration-guides.md").read_text(encoding="utf-8")
    parts = text.split("\n## ")[1:]
    return {name: _chapter(name, part) for name, part in zip(NAMES, parts, strict=True)}


def _chapter(name: str, text: str) -> Chapter:
    blocks = BLOCK.findall(text)
    assert len(blocks) == 1, f"{name}: one block of commands, not {len(blocks)}"
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    rows = [Row(name, *row) for row in cells[2:]]
    return Chapter(name, tuple(blocks[0].splitlines()), tuple(rows))


def words_of(line: str) -> list[str]:
    """Return the words of a command behind `anabatic`; `eval "$(...)"` is the command within."""
    inner = re.fullmatch(r'eval "\$\((.*)\)"', line)
    words = shlex.split(inner[1] if inner else line)
    assert words[0] == "anabatic", line
    return words[1:]


def says(line: str, asked: str) -> bool:
    """True when a command of the page has all the words of a row's command, in their order; capitals stand for any."""
    rest = iter(words_of(line))
    return all(any(word == given or word.isupper() for given in rest) for word in words_of(asked))
