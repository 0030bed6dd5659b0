"""The architecture page: every walk names files that exist, none twice, in both languages; rooms as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from house import tree

PAGES = [Path("docs") / language / "concepts" / "architecture.md" for language in ("en", "zh")]
NAMES = ("walk-row", "walk-checkpoint", "walk-npu-smi", "walk-request", "walk-program", "walk-option")


def read_walks(page: Path) -> dict[str, list[str]]:
    """Return the files of each walk, in their order."""
    text = (tree.ROOT / page).read_text(encoding="utf-8")
    sections = re.split(r"^#+ .*\{#([\w-]+)\}$", text, flags=re.M)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    return {name: re.findall(r"^\| `([\w/]+\.py)` \|", found[name], flags=re.M) for name in NAMES}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_walks_name_files_once(page: Path) -> None:
    for name, files in read_walks(page).items():
        assert len(files) >= 8, name
        assert len(set(files)) == len(files), f"{name} visits a file twice"
        missing = [file for file in files if not (tree.ROOT / "src/anabatic" / file).is_file()]
        assert not missing, f"{name}: {missing}"


def test_both_languages_walk_alike() -> None:
    english, chinese = map(read_walks, PAGES)
    assert english == chinese


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_folders_of_the_rooms(page: Path) -> None:
    text = (tree.ROOT / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", text, flags=re.M)
    package = tree.ROOT / "src" / "anabatic"
    for room, folders in rows:
        folder = package / room if (package / room).is_dir() else package.parent / room
        there = {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}
        assert set(re.findall(r"\w+", folders)) == there, room
    assert len(rows) > 10
