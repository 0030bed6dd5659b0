"""Every program of benchmarks/ is explained, and every figure's page is named."""

from __future__ import annotations

import re

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
