"""Both languages tell the same, links lead somewhere, and the generated pages are current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.config.loading import shipped_recipes
from house import tree

DOCS = tree.ROOT / "docs"
LANGUAGES = ("en", "zh")
PAGES = sorted({page.relative_to(DOCS / code).as_posix() for code in LANGUAGES for page in (DOCS / code).rglob("*.md")})
MARKDOWN = [*sorted(tree.ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.M | re.S)


def headings(text: str) -> list[int]:
    """Return the levels of the headings, code blocks left out."""
    return [len(mark) for mark in re.findall(r"^(#{1,6}) ", FENCE.sub("", text), re.M)]


def anchor(title: str) -> str:
    """Return the anchor that a heading gets, on the site (pymdownx.slugs) and on GitHub."""
    if own := re.search(r"\{#([\w-]+)\}", title):
        return own.group(1)
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page."""
    return {anchor(title) for title in re.findall(r"^#{1,6} (.*)$", FENCE.sub("", page.read_text("utf-8")), re.M)}


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_page(page: str) -> None:
    texts = [(DOCS / code / page) for code in LANGUAGES]
    assert all(text.exists() for text in texts), f"{page} is missing in one language"
    english, chinese = (headings(text.read_text(encoding="utf-8")) for text in texts)
    assert english == chinese, f"{page}: the headings differ, en {english}, zh {chinese}"
    assert english.count(1) == 1
    commands = [code_blocks(text.read_text(encoding="utf-8")) for text in texts]
    assert commands[0] == commands[1], f"{page}: the commands differ"


def test_readmes_tell_the_same() -> None:
    english, chinese = ((tree.ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    assert headings(english) == headings(chinese)
    assert code_blocks(english) == code_blocks(chinese)


def code_blocks(text: str) -> list[str]:
    """Return the commands of the bash blocks, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    return [re.sub(r"\s*#.*", "", block).strip() for block in blocks]


CHINESE = r"[\u3000-\u9fff\uff00-\uffef]"
CHINESE_PAGES = [tree.ROOT / "README.zh.md", *sorted((DOCS / "zh").rglob("*.md"))]


@pytest.mark.parametrize("page", CHINESE_PAGES, ids=tree.name)
def test_chinese_lines_are_not_broken(page: Path) -> None:
    """A line break between two Chinese characters shows as a blank in the middle of a sentence."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(rf"{CHINESE}\n{CHINESE}", text) == []


@pytest.mark.parametrize("page", MARKDOWN, ids=tree.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        if not other.exists() or (fragment and fragment not in anchors(other)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("code", LANGUAGES)
def test_navigation_lists_every_page(code: str) -> None:
    listed = set(re.findall(r'"([\w/-]+\.md)"', (DOCS / f"zensical.{code}.toml").read_text(encoding="utf-8")))
    assert listed == {page.relative_to(DOCS / code).as_posix() for page in (DOCS / code).rglob("*.md")}


def test_navigation_is_the_same_in_both_languages() -> None:
    texts = [(DOCS / f"zensical.{code}.toml").read_text(encoding="utf-8") for code in LANGUAGES]
    english, chinese = (re.findall(r"^ +\]|= \[$|[\w/-]+\.md", text, re.M) for text in texts)
    assert english == chinese


@pytest.mark.process
@pytest.mark.parametrize("name", ["gen_reference", "gen_recipes", "gen_errors", "gen_diagrams", "gen_schemas"])
def test_generated_pages_are_current(name: str) -> None:
    script = tree.ROOT / "scripts" / f"{name}.py"
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("code", LANGUAGES)
def test_every_recipe_is_in_the_guide(code: str) -> None:
    page = (DOCS / code / "guides" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in shipped_recipes.RECIPES if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES)
def test_anchors_are_the_same_in_both_languages(page: str) -> None:
    """A link to a part of a page leads to the same part of the other language's page."""
    texts = [FENCE.sub("", (DOCS / code / page).read_text("utf-8")) for code in LANGUAGES]
    english, chinese = ([anchor(title) for title in re.findall(r"^##+ (.*)$", text, re.M)] for text in texts)
    assert english == chinese, f"{page}: write {{#anchor}} behind the headings of the Chinese page"
