"""Every command that a page tells a reader to type is one that this version understands."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from anabatic.cli import app
from anabatic.config.loading import command_table, shipped_recipes, validation
from house import tree

PAGES = [*sorted(tree.ROOT.glob("*.md")), *sorted((tree.ROOT / "docs").rglob("*.md"))]
OTHER_PROGRAMS = set(
    [
        "curl",
        "docker",
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
        "export",
        "eval",
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
        command, bound, _ = app.build_app().parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        pytest.fail(f"anabatic {' '.join(words)}: {error}")
    fitting = [name for name in command_table.COMMANDS if words[: len(name.split())] == name.split()]
    name = max(fitting, key=len, default="")
    if name and name != "run":
        from anabatic.cli import job_command

        row = command_table.get_command(name)
        given = {key: value for key, value in bound.arguments.items() if key not in ("config", job_command.DRY_RUN)}
        if bare := given.pop(row.positional_setting.upper(), ()):
            texts = [validation.UntypedText(word) for word in bare]
            given[row.positional_setting] = (
                texts
                if "list" in str(validation.field_types(row.import_job_class())[row.positional_setting])
                else texts[0]
            )
        validation.check_section(job_command.nest_options(given), row.import_job_class(), validation.OptionNamer())
    assert callable(command)


def test_readme_names_the_two_commands() -> None:
    for name in ("README.md", "README.zh.md"):
        found = [words for _, words in typed(tree.ROOT / name)]
        assert ["make", "demo"] in found
        assert ["make", "test"] in found


def test_lines_are_joined_and_comments_dropped(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```bash\n# a comment\nmake demo   # why\nanabatic chat \\\n  -m x\n```\n```text\nls\n```\n")
    assert [words for _, words in typed(page)] == [["make", "demo"], ["anabatic", "chat", "-m", "x"]]
