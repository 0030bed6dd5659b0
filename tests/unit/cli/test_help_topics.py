"""`anabatic help`: every page of the documentation, found by its name or its words."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabatic.cli import help_topics
from anabatic.core.errors import ConfigError, Failure


def test_every_page_is_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    for lang in ("en", "zh"):
        pages = help_topics.find_pages(lang)
        files = [
            page for section in help_topics.SECTIONS for page in (help_topics.FOLDERS[1] / lang / section).glob("*.md")
        ]
        assert len(pages) == len(files), "two pages have one name"
        help_topics.help_(lang=lang)
        listed = capsys.readouterr().out
        assert all(f"  {name} " in listed for name in pages) and "{#" not in listed


def test_a_page_is_printed_without_marks_of_the_site(capsys: pytest.CaptureFixture[str]) -> None:
    for name in help_topics.find_pages("en"):
        help_topics.help_(name, lang="en")
        out = capsys.readouterr().out
        assert out.startswith("# ") and "<!--" not in out and "{#" not in out, name
    help_topics.help_("packing", lang="zh")
    assert capsys.readouterr().out.startswith("# ")


def test_commands_are_topics(capsys: pytest.CaptureFixture[str]) -> None:
    help_topics.help_("checkpoint", "verify")
    assert capsys.readouterr().out.startswith("Usage: anabatic checkpoint verify [OPTIONS] PATH\n")
    help_topics.help_("tokenizer", "train")
    assert "Usage: anabatic tokenizer train" in capsys.readouterr().out


def test_search_finds_sections(capsys: pytest.CaptureFixture[str]) -> None:
    help_topics.help_("zero3", "memory", lang="en", search=True)
    rows = capsys.readouterr().out.splitlines()
    assert 0 < len(rows) <= 12
    with pytest.raises(ConfigError, match="no page contains"):
        help_topics.help_("qwertzuiop", search=True)


def test_what_does_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='no topic "finetuning". Did you mean "fine-tuning"'):
        help_topics.help_("finetuning")
    with pytest.raises(ConfigError, match="no topic"):
        help_topics.help_("../../../etc/passwd")
    with pytest.raises(ConfigError, match='--lang is "fr"'):
        help_topics.help_(lang="fr")
    monkeypatch.setattr(help_topics, "FOLDERS", (tmp_path,))
    with pytest.raises(Failure, match="no documentation"):
        help_topics.help_()
