"""The table of torch versions in the guide: scripts/sim_versions.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    return importlib.import_module("sim_versions")


def test_new_rows_replace_those_of_their_version_alone(versions: ModuleType) -> None:
    page = f"before\n\n{versions.BEGIN}\n{versions.END}\nafter\n"
    parts = ((12, 12), (13, 14))
    first = versions.Row("2.10.0", ("2.10.0.post7", "9.2.0", "3.11.2"), parts)
    page = versions.merge_rows(page, [first, versions.Row("2.9.0", (), ())], "en")
    page = versions.merge_rows(page, [versions.Row("2.9.0", ("2.9.0.post9", "9.2.0", "3.12.3"), parts)], "en")
    assert page.startswith("before\n\n") and page.endswith("\nafter\n")
    assert [line for line in page.splitlines() if line.startswith("| 2")] == [
        "| 2.9.0 | 2.9.0.post9 | 9.2.0 | 3.12.3 | yes | 12 of 12 | 13 of 14 |",
        "| 2.10.0 | 2.10.0.post7 | 9.2.0 | 3.11.2 | yes | 12 of 12 | 13 of 14 |",
    ]
    assert versions.merge_rows(page, [], "en") == page


def test_a_torch_that_does_not_compile_has_a_row(versions: ModuleType) -> None:
    assert versions.Row("2.9.0", (), ()).render("zh") == "| 2.9.0 | - | - | - | 不能 | - | - |"


def test_a_page_without_its_place_is_refused(versions: ModuleType) -> None:
    with pytest.raises(ValueError, match="the page has no"):
        versions.merge_rows("text", [], "en")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_guide_has_a_table_for_the_oldest_torch(versions: ModuleType, language: str) -> None:
    text = (ROOT / versions.PAGE.format(language=language)).read_text(encoding="utf-8")
    assert f"\n{chr(10).join(versions.render_head(language))}\n| 2.7.1 |" in text
