"""No block without a test: each stands in a table, and both languages show the same."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import yaml

from house import tree
from pages import blocks, test_files, test_python, test_quoted_output, visit
from pages.how import HOW, how

LANGUAGES = {"bash", "python", "yaml", "json", "text", "dockerfile"}
CONTAINERS = "two lines of an image: the base and pip; building one needs docker and an index"
ALL = [block for page in blocks.ENGLISH for block in blocks.blocks(page)]


def known(block: blocks.Block) -> bool:
    """True when a table says what becomes of a block."""
    tables = {
        "bash": lambda: all(how(one.text) for one in blocks.commands(block)),
        "python": lambda: (
            visit.title(block.page) in test_python.AFTER or tree.name(block.page) in test_python.ELSEWHERE
        ),
        "yaml": lambda: test_files.place(block) in test_files.YAML,
        "json": lambda: test_files.place(block) in test_files.JSON,
        "text": lambda: test_quoted_output.row(block) is not None,
        "dockerfile": lambda: (
            set(re.findall(r"^(?:#|[A-Z]+)", block.text, re.M)) <= {"#", "ARG", "FROM", "COPY", "RUN"}
        ),
    }
    return bool(tables[block.language]())


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.name)
def test_block_has_a_class(block: blocks.Block) -> None:
    assert block.language in LANGUAGES, f"```{block.language}: name one of {sorted(LANGUAGES)}"
    assert known(block), f"{block.name}: say in tests/pages what becomes of it"


def test_tables_name_no_block_that_is_gone() -> None:
    there = {(block.language, *test_files.place(block)) for block in ALL}
    listed = [("yaml", *key) for key in test_files.YAML] + [("json", *key) for key in test_files.JSON]
    assert not set(listed) - there
    pages = {visit.title(block.page) for block in ALL if block.language == "python"}
    assert set(test_python.AFTER) | set(test_python.BEFORE) <= pages
    texts = [one.text for page in blocks.ENGLISH for one in visit.lines(page)]
    assert not [row.pattern for row in HOW if row not in map(how, texts)]
    shown = [test_quoted_output.row(block) for block in ALL]
    assert not [row for row in test_quoted_output.ROWS if row not in shown]


def words(block: blocks.Block) -> object:
    """Return what the other language must show as well."""
    if block.language == "text":
        return None
    if block.language == "yaml":
        return plain(yaml.safe_load(block.text))
    return blocks.bare(block.text)


def plain(value: object) -> object:
    """Return parsed YAML without texts of a language."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key not in ("en", "zh", "title")}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("page", [one for one in blocks.ENGLISH if blocks.chinese(one)], ids=visit.title)
def test_both_languages_show_the_same(page: object) -> None:
    other = blocks.chinese(page)
    assert other is not None
    english, chinese = blocks.blocks(page), blocks.blocks(other)
    assert [one.language for one in english] == [one.language for one in chinese]
    assert [words(one) for one in english] == [words(one) for one in chinese]


def test_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """How many blocks of each language there are, and what becomes of the commands; with -s on the screen."""
    ways = Counter(how(one.text).way for page in blocks.ENGLISH for one in visit.lines(page))
    languages = Counter(block.language for block in ALL)
    with capsys.disabled():
        pass
    print(dict(languages), dict(ways))
    assert ways["run"] > ways["read"] + ways["no"]
