"""Every command that a page tells a reader to type is one that this version understands."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from anabatic.cli import command_tree, job_command
from anabatic.cli.parsing.command_line import UsageError
from anabatic.config.loading import command_table, shipped_recipes, validation
from house import tree

PAGES = [*sorted(tree.ROOT.glob("*.md")), *sorted((tree.ROOT / "docs").rglob("*.md"))]
OTHER_PROGRAMS = set(
    [
        "anabatic-sim",
        "curl",
        "docker",
        "helm",
        "npu-smi",
        "git",
        "kubectl",
        "ray",
        "cd",
        "sudo",
        "python",
        "python3",
        "source",
        "ssh",
        "pip",
        "pytest",
        "export",
        "echo",
        "eval",
        "uv",
        "uvx",
        "tar",
        ".ci/run",
        ".venv/bin/pre-commit",
    ]
)


def typed(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, words) of the commands in the ```bash blocks of a page; `\\` joins lines."""
    lines = page.read_text(encoding="utf-8").splitlines()
    inside, pending, start = False, "", 0
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("```"):
            inside = not inside and line.strip() == "```bash"
            continue
        if not inside or not line.strip():
            continue
        start = start if pending else number
        pending += line.strip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            continue
        words = shlex.split(pending, comments=True)
        pending = ""
        if words:
            yield start, words


CASES = [(page, line, words) for page in PAGES for line, words in typed(page)]
IDS = [f"{tree.name(page)}:{line}" for page, line, _ in CASES]


@pytest.mark.process
@pytest.mark.parametrize(("page", "line", "words"), CASES, ids=IDS)
def test_command_is_understood(page: Path, line: int, words: list[str]) -> None:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/") if words else "#"
    if program == "anabatic":
        anabatic(words[1:])
    elif program == "make":
        make(words[1:])
    elif words:
        assert words[0] in OTHER_PROGRAMS, f"{words[0]} is not a program the pages use"


def make(words: list[str]) -> None:
    """The targets exist."""
    run = subprocess.run(["make", "--dry-run", *words], cwd=tree.ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def anabatic(words: list[str]) -> None:
    """The command, its options and the recipes it names exist, and the values are of their type."""
    words = [word for word in words if word != "--debug"]
    for before, word in pairwise(words):
        if before in ("-c", "run") and not word.startswith("-") and "." not in word:
            assert word in shipped_recipes.RECIPES, f"there is no recipe {word}"
    if not {"--help", "--version"}.isdisjoint(words) or not words:
        return
    try:
        name, rest = command_tree.find_command(words)
        _, line = command_tree.parse_command(name, rest)
    except UsageError as error:
        pytest.fail(f"anabatic {' '.join(words)}: {error}")
    if command_tree.is_job(command_tree.COMMANDS[name]):
        cls = command_table.COMMANDS.find_row(name).import_job_class()
        validation.check_section(job_command.read_job_options(name, line).tree, cls, validation.OptionNamer())


def test_readme_names_the_two_commands() -> None:
    for name in ("README.md", "README.zh.md"):
        found = [words for _, words in typed(tree.ROOT / name)]
        assert ["make", "demo"] in found
        assert ["make", "test"] in found


def test_lines_are_joined_and_comments_dropped(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```bash\n# a comment\nmake demo   # why\nanabatic chat \\\n  -m x\n```\n```text\nls\n```\n")
    assert [words for _, words in typed(page)] == [["make", "demo"], ["anabatic", "chat", "-m", "x"]]
