"""One logo: every page, picture and text that shows one shows that of `core/logo.py`."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from anabatic.core.logo import FAVICON_URL, INLINE_LOGO, LOGO_SVG
from anabatic.infer.web import pages as chat_pages
from anabatic.train.report.comparison_page import write_comparison
from anabatic.train.report.page import write_run_report
from anabatic_studio import pages as studio_pages
from anabatic_vessels.maps.html_page import render_local_page
from unit.fake_runs import write_training_run

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def list_shapes(svg: str) -> list[tuple[str, dict[str, str]]]:
    """Tag and attributes of what a picture draws."""
    root = ElementTree.fromstring(svg)
    assert root.get("viewBox") == "0 0 24 24"
    return [(shape.tag.removeprefix(SVG), dict(shape.attrib)) for shape in root]


def test_the_three_forms_are_one_picture() -> None:
    shapes = list_shapes(LOGO_SVG)
    assert [tag for tag, _ in shapes] == ["rect", "path", "path"]
    kind, _, picture = FAVICON_URL.partition(",")
    assert kind == "data:image/svg+xml" and '"' not in picture and "#" not in picture
    assert list_shapes(INLINE_LOGO) == list_shapes(unquote(picture)) == shapes


@pytest.fixture(scope="module")
def every_page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    runs = [tmp_path_factory.mktemp("runs") / name for name in ("a", "b")]
    for run in runs:
        write_training_run(run, steps=3)
    return {
        "chat": chat_pages.chat_page().html,
        "studio": studio_pages.studio_page().html,
        "studio chat": studio_pages.chat_page().html,
        "map": render_local_page([], "map", 0),
        "report": write_run_report(runs[0]).read_text(encoding="utf-8"),
        "comparison": write_comparison(runs, runs[0].parent / "c.html").read_text(encoding="utf-8"),
    }


@pytest.mark.parametrize("name", ["chat", "studio", "studio chat", "map", "report", "comparison"])
def test_pages_show_it_once_and_in_the_tab(every_page: dict[str, str], name: str) -> None:
    html = every_page[name]
    assert html.count(INLINE_LOGO) == html.count('class="logo"') == 1
    assert re.findall(r'<link rel="icon" href="([^"]*)">', html) == [FAVICON_URL]


@pytest.mark.parametrize("code", ["en", "zh"])
def test_the_documentation_shows_it(code: str) -> None:
    assert (ROOT / "docs" / code / "assets" / "logo.svg").read_text(encoding="utf-8") == LOGO_SVG
    settings = (ROOT / "docs" / f"zensical.{code}.toml").read_text(encoding="utf-8")
    assert 'logo = "assets/logo.svg"\nfavicon = "assets/logo.svg"\n' in settings
    readme = (ROOT / ("README.md" if code == "en" else "README.zh.md")).read_text(encoding="utf-8")
    assert f"](docs/{code}/assets/logo.svg)" in readme
