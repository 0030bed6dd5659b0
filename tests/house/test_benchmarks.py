"""Every program of benchmarks/ is explained, and every figure's page is named."""

from __future__ import annotations

import argparse
import re
import runpy

import pytest

from house import tree

FOLDER = tree.ROOT / "benchmarks"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
GUIDES = [*sorted((tree.ROOT / "docs" / "en").rglob("*.md")), tree.ROOT / "README.md"]


def test_every_program_is_in_the_readme() -> None:
    programs = {path.name for path in FOLDER.glob("*.py")}
    named = set(re.findall(r"\b([a-z_]+\.py)\b", re.sub(r"tests/\S+", "", README)))
    assert not programs - named, "say in benchmarks/README.md what they measure, and their command"
    assert not {name for name in named - programs if f"benchmarks/{name}" in README}


def test_every_page_that_names_a_program_is_named_by_it() -> None:
    """A figure whose page names its program is found from the program, too."""
    rows = {match[1]: line for line in README.splitlines() if (match := re.search(r"benchmarks/([a-z_]+\.py)", line))}
    lost = []
    for page in GUIDES:
        for name in set(re.findall(r"benchmarks/([a-z_]+\.py)", page.read_text(encoding="utf-8"))):
            if page.name not in rows.get(name, ""):
                lost.append(f"{name}: {tree.name(page)}")
    assert not lost, "name the page in the program's row of benchmarks/README.md"


def test_what_runs_alone_is_what_needs_nothing() -> None:
    """`make bench` leaves out parts of programs, and programs that ask for another one or for data."""
    makefile = (tree.ROOT / "Makefile").read_text(encoding="utf-8")
    left_out = set(re.search(r"^NOT_ALONE := (.*)$", makefile, re.M)[1].split())  # type: ignore[index]
    needs = {
        path.stem
        for path in FOLDER.glob("*.py")
        if "required=True" in (text := path.read_text(encoding="utf-8")) or '__name__ == "__main__"' not in text
    }
    assert needs <= left_out and left_out <= {path.stem for path in FOLDER.glob("*.py")}


def test_numbers_of_options_are_checked() -> None:
    """`--rounds 0` or `--seconds nan` is refused before anything is measured."""
    any_number = {"--seed", "--shots", "--large"}  # 0 has a meaning
    unchecked = [
        f"{path.name}: {option}"
        for path in sorted(FOLDER.glob("*.py"))
        for option in re.findall(
            r'add_argument\(\s*"(--[a-z-]+)"[^()]*type=(?:int|float)\b', path.read_text(encoding="utf-8")
        )
        if option not in any_number
    ]
    assert not unchecked, "use positive_int or positive_number of benchmarks/option_types.py"


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("positive_int", ["0", "-1", "1.5", "", "many"]),
        ("positive_number", ["0", "-1", "nan", "inf", "", "many"]),
        ("positive_ints", ["", "1,", "1,0"]),
        ("positive_numbers", ["", "1,nan"]),
        ("nanochat_checkout", ["", "/nowhere", str(tree.ROOT)]),
        ("program", ["", "/nowhere/python", str(tree.ROOT)]),
    ],
)
def test_what_cannot_be_measured_is_refused(kind: str, bad: list[str]) -> None:
    types = runpy.run_path(str(FOLDER / "option_types.py"))
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            types[kind](text)
