"""Pictures in the docs exist, are small, have a text, and those of the web pages are made by a command."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from house import tree

DOCS = tree.ROOT / "docs"
PAGES = [path for path in tree.tracked() if path.suffix == ".md" and (path.parent == tree.ROOT or DOCS in path.parents)]
MAX_BYTES = 120_000
CHINESE = re.compile(r"[\u4e00-\u9fff]")
PICTURE = re.compile(r"!\[([^]]*)\]\(([^)\s]+)\)")


def find_pictures(page: Path) -> list[tuple[str, Path]]:
    """Return text and file of each picture of a page."""
    return [(text, (page.parent / target).resolve()) for text, target in PICTURE.findall(page.read_text("utf-8"))]


def list_made() -> set[str]:
    """Return the names of the pictures that scripts/make_screenshots.py makes."""
    calls = [
        call
        for call in ast.walk(tree.parse(tree.ROOT / "scripts" / "make_screenshots.py"))
        if isinstance(call, ast.Call)
    ]
    return {
        f"screen-{call.args[0].value}.webp"
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "Shot" and isinstance(call.args[0], ast.Constant)
    }


@pytest.mark.parametrize("page", [page for page in PAGES if find_pictures(page)], ids=tree.name)
def test_pictures_exist_with_a_text_in_the_language_of_the_page(page: Path) -> None:
    is_chinese = "zh" in page.relative_to(tree.ROOT).parts or page.name.endswith(".zh.md")
    for text, file in find_pictures(page):
        assert file.is_file(), f"{page.name} shows {file}, which is missing"
        assert file.stat().st_size <= MAX_BYTES, f"{file.name} has {file.stat().st_size} bytes, more than {MAX_BYTES}"
        assert len(text) >= 10, f"{page.name}: say what {file.name} shows"
        assert bool(CHINESE.search(text)) == is_chinese, f"{page.name}: the text of {file.name} is in another language"
        assert file.parent == DOCS / ("zh" if is_chinese else "en") / "assets"


@pytest.mark.parametrize("code", ["en", "zh"])
def test_pictures_of_web_pages_are_those_that_the_command_makes(code: str) -> None:
    files = {path.name for path in (DOCS / code / "assets").glob("screen-*")}
    shown = {file.name for page in PAGES for _, file in find_pictures(page) if file.parent == DOCS / code / "assets"}
    assert files == list_made(), "run make screenshots, or remove what it no longer makes"
    assert files <= shown, "show it on a page, or make it no more"
