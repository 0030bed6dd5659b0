"""The developer notes are complete: every decision is in the index, and what is measured has its command."""

from __future__ import annotations

import re

from house import tree
from house.limits import LIMITS

NOTES = tree.ROOT / "docs" / "dev"
INDEX = (NOTES / "DECISIONS.md").read_text(encoding="utf-8")
BY_HAND = (NOTES / "decisions" / "by-hand-or-library.md").read_text(encoding="utf-8")
PAGE_LINES = LIMITS["decision_lines"]
"""Most lines of a decision's page: about two screens."""
CODE_PATH = re.compile(r"`((?:[a-z0-9_]+/)+(?:[a-z0-9_]+\.py)?)`")
FOLDERS = {"benchmarks", "charts", "containers", "decisions", "scripts", "tests"}
"""What a path may begin with besides a room or a package."""


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows below a heading, without the first two lines of the table."""
    block = text.partition(heading)[2].lstrip("\n").split("\n#")[0]
    lines = [line for line in block.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


TABLES = {"torch-npu-tests.md", "pytorch-tests.md"}
"""Written by scripts/sim_suite.py: their paths are files of other projects."""


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\(decisions/([\w-]+\.md)\)", INDEX))
    assert linked == {path.name for path in (NOTES / "decisions").glob("*.md")}


def test_a_page_is_short() -> None:
    for path in (NOTES / "decisions").glob("*.md"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= PAGE_LINES, tree.name(path)


def test_the_index_and_the_page_have_the_same_parts() -> None:
    """By hand or by library: the short table and the one with reasons."""
    short = [(row[0], row[2]) for row in table_rows(INDEX, "## By hand or by library")]
    long = [(re.sub(r" \(`.*\)", "", row[0]), row[3]) for row in table_rows(BY_HAND, "# By hand or by library")]
    assert short == long and len(short) >= 20


def count_lines(path: str) -> int:
    """Return the lines of a file, or of the Python and JavaScript files of a folder."""
    base = next(place / path for place in (tree.SRC, tree.SRC.parent) if (place / path).exists())
    files = [file for file in base.iterdir() if file.suffix in (".py", ".js")] if base.is_dir() else [base]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_lines_by_hand_are_those_of_today() -> None:
    """Within a tenth, so that not every change needs a new figure."""
    counted = 0
    for part, lines, *_ in table_rows(BY_HAND, "# By hand or by library"):
        if lines == "-":
            continue
        today = sum(map(count_lines, re.findall(r"`([\w/.]+)`", part)))
        assert abs(int(lines.replace(",", "")) - today) <= today / 10, f"{part}: {today:,} lines"
        counted += 1
    assert counted > 20


def test_paths_of_the_code_exist() -> None:
    """Code moves; the notes follow."""
    source, lost = tree.ROOT / "src" / "anabatic", []
    for page in NOTES.rglob("*.md"):
        if page.name in TABLES:
            continue
        for path in CODE_PATH.findall(page.read_text(encoding="utf-8")):
            base = tree.ROOT if path.split("/")[0] in FOLDERS else source
            if not any((place / path).exists() for place in (base, source.parent, NOTES)):
                lost.append(f"{tree.name(page)}: {path}")
    assert not lost
