"""The architecture page in both languages: walks that a profiled run passes; rooms and files that exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from house import tree
from house.call_recorder import read_calls

PAGES = [Path("docs") / language / "concepts" / "architecture.md" for language in ("en", "zh")]
NAMES = ("walk-row", "walk-checkpoint", "walk-npu-smi", "walk-request", "walk-program", "walk-option")


RECORDINGS = {
    "walk-row": ("training",),
    "walk-checkpoint": ("resume",),
    "walk-npu-smi": ("monitor", "device_stats"),
    "walk-request": ("request",),
    "walk-program": ("program", "zygote-*"),
    "walk-option": ("training",),
}
"""What `walked_program.py` records for each walk."""
OTHER_MODES = {"namespaces": "sandbox/isolation/landlock.py", "landlock": "sandbox/isolation/namespaces.py"}
"""Isolation that this kernel allows -> the step of the other one, which does not run here."""


def read_sections(page: Path) -> dict[str, str]:
    """Return the text below each heading that has an anchor."""
    text = (tree.ROOT / page).read_text(encoding="utf-8")
    parts = re.split(r"^#+ .*\{#([\w-]+)\}$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def read_walks(page: Path) -> dict[str, list[str]]:
    """Return the steps of each walk, `room/file.py: function`, in their order."""
    sections = read_sections(page)
    steps = {name: re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", sections[name], flags=re.M) for name in NAMES}
    return {name: [f"{file}: {function}" for file, function in found] for name, found in steps.items()}


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recorded calls of all walks."""
    folder = tmp_path_factory.mktemp("walked")
    (folder / "steps.json").write_text(json.dumps(list_steps()))
    program = subprocess.run(
        [sys.executable, tree.ROOT / "tests/house/walked_program.py", folder],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree.ROOT / "src"), str(tree.ROOT / "tests")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr
    return folder


def list_steps() -> list[str]:
    """Return the steps of all walks, each once."""
    return sorted({step for steps in read_walks(PAGES[0]).values() for step in steps})


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_a_run_passes_the_steps_of_a_walk(name: str, walked: Path) -> None:
    files = [file for pattern in RECORDINGS[name] for file in walked.glob(f"{pattern}.calls")]
    calls = iter(read_calls(files, list_steps()))
    absent = OTHER_MODES.get((walked / "mode.txt").read_text())
    passed: list[str] = []
    for step in read_walks(PAGES[0])[name]:
        if not (absent and step.startswith(absent)):
            assert step in calls, f"{step} does not run after {passed}"
            passed.append(step)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_walks_name_files_once(page: Path) -> None:
    for name, steps in read_walks(page).items():
        files = [step.partition(":")[0] for step in steps]
        assert len(files) >= 8, name
        assert len(set(files)) == len(files), f"{name} visits a file twice"


def test_both_languages_walk_alike() -> None:
    english, chinese = map(read_walks, PAGES)
    assert english == chinese


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_that_a_change_begins_in(page: Path) -> None:
    rows = [line.split("|")[2:4] for line in read_sections(page)["where"].splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    for places in rows:
        for cell in places:
            names = [name for name in re.findall(r"`([^`]+)`", cell) if "/" in name]
            assert names and all(is_there(name) for name in names), names


def is_there(name: str) -> bool:
    """Say whether a file of the page is in the package, among the packages or in the repository."""
    return any((tree.ROOT / folder / name).exists() for folder in ("src/anabatic", "src", "."))


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
