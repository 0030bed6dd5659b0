"""The report in English and in Chinese: nothing is left in the other language."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Formatter

import pytest

from anabatic.config.pipeline import PipelineJob, PipelineStage
from anabatic.train.report import run_facts
from anabatic.train.report.comparison_page import write_comparison
from anabatic.train.report.localized_page import EVENT_WORDS, FIELD_WORDS, WORDS, describe_duration, get_text
from anabatic.train.report.page import write_pipeline_report, write_run_report
from suite.fake_runs import START_TIME, write_jsonl, write_pipeline_run
from unit.train.report_pages import Page, write_full_run

HAN = re.compile(r"[\u4e00-\u9fff]")
LATIN = re.compile(r"[A-Za-z]{2,}")
PROPER = {"anabatic", "English", "gzip", "json", "JSON", "jsonl", "metrics", "events", "eval", "config", "yaml", "MFU"}
PROPER |= {"summary", "KiB", "MiB", "GiB", "Wh", "ms", "nat", "token"}
"""Names of programs and files, and units, which Chinese engineers write like this."""


def machine_words() -> set[str]:
    texts = [run_facts.describe_cpu().zh, run_facts.describe_memory()]
    texts += [f"{name} {version}" for name, version in run_facts.list_versions()]
    commit = run_facts.find_commit(Path(run_facts.__file__).parent)
    return set(LATIN.findall(" ".join([*texts, commit.zh if commit else ""])))


def test_every_text_has_both_languages_and_the_same_figures() -> None:
    for table in (WORDS, EVENT_WORDS, FIELD_WORDS):
        for key, (english, chinese) in table.items():
            names = [
                {name for _, name, _, _ in Formatter().parse(side) if name is not None} for side in (english, chinese)
            ]
            assert names[0] == names[1], key
            assert not HAN.search(english), key
            words = re.sub(r"\{\w+\}", "", chinese)
            assert HAN.search(words) or not LATIN.search(words) or chinese == english == "torch", key
            assert set(LATIN.findall(words)) <= PROPER | {"torch"}, key


def test_figures_that_are_texts_follow_the_language() -> None:
    assert get_text("measured_in", name=get_text("out_of_date", name="a{b}")).zh == "在 a{b}（已过期） 中测得"
    assert [describe_duration(seconds).zh for seconds in (4.2, 185, 7620)] == ["4.2 秒", "3 分 05 秒", "2 小时 07 分"]
    assert [describe_duration(seconds).en for seconds in (4.2, 185, 7620)] == ["4.2s", "3m05s", "2h07m"]
    with pytest.raises(KeyError):
        get_text("measured_in")


def make_pages(tmp_path: Path, language: str) -> list[Page]:
    """A run with many values, one with a single value of each metric, a pipeline in every state, a comparison."""
    folders = [tmp_path / "1", tmp_path / "2", tmp_path / "3"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        write_full_run(folder, steps=1 if seed == 1 else 20, seed=seed)
    (folders[2] / "eval.json").write_text("{")
    (folders[2] / "summary.json").write_text("[]")
    events = [
        {"event": "data", "train": [{"source": "9", "kind": "text"}], "heldout": [{"source": "8", "kind": "text"}]}
    ]
    write_jsonl(folders[2] / "events.jsonl", events)
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "config.yaml").write_text("[")
    states = ["done", "fail", "interrupted", "run", "stale", ""]
    rows = [
        {"time": START_TIME + at, "event": "stage", "stage": str(at + 1), "state": state, "seconds": 70.0}
        for at, state in enumerate(states)
    ]
    write_jsonl(tmp_path / "pipeline.jsonl", [*rows, {**rows[0], "state": "skip"}])
    job = PipelineJob(
        title="流水线", stages={str(at + 1): PipelineStage(command="pretrain", title="阶段") for at in range(6)}
    )
    written = [write_run_report(folder, language) for folder in folders]  # type: ignore[arg-type]
    written.append(write_pipeline_report(tmp_path, job, language))  # type: ignore[arg-type]
    written.append(write_comparison([*folders, tmp_path / "4"], tmp_path / "c.html", language))  # type: ignore[arg-type]
    return [Page(path) for path in written]


@pytest.mark.process
def test_no_english_is_left_on_a_chinese_page(tmp_path: Path) -> None:
    allowed = PROPER | machine_words() | set(LATIN.findall(str(tmp_path)))
    for page in make_pages(tmp_path, "zh"):
        assert '<html lang="zh">' in page.source
        labels = [value for _, name, value in page.attributes if name in ("aria-label", "data-label", "title")]
        names = [series["name"][1] for chart in page.charts() for series in chart]
        other_side = [chinese for _, chinese in page.texts()]
        shown = re.sub(r"（?\S*Expecting.*?\(char \d+\)", "", " ".join([page.text, *labels, *names, *other_side]))
        assert set(LATIN.findall(shown)) - allowed == set()


def test_no_chinese_is_left_on_an_english_page(tmp_path: Path) -> None:
    own = set("问答易难其他任务别人你好流水线阶段一二中文")
    for page in make_pages(tmp_path, "en"):
        assert '<html lang="en">' in page.source
        labels = [value for _, name, value in page.attributes if name in ("aria-label", "data-label")]
        names = [series["name"][0] for chart in page.charts() for series in chart]
        shown = " ".join([page.text, *labels, *names, *[english for english, _ in page.texts()]])
        assert set(HAN.findall(shown)) - own == set()


def test_the_locale_chooses_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    job = write_pipeline_run(tmp_path, steps=30)
    for locale, language in (("zh_CN.UTF-8", "zh"), ("en_GB.UTF-8", "en"), ("", "en"), ("C", "en")):
        monkeypatch.setenv("LANG", locale)
        page = Page(write_pipeline_report(tmp_path, job))
        assert f'<html lang="{language}">' in page.source
        assert ("训练报告" in page.text) is (language == "zh")


def test_both_languages_are_in_one_page(tmp_path: Path) -> None:
    write_full_run(tmp_path)
    pages = [Page(write_run_report(tmp_path, language)) for language in ("en", "zh")]
    assert pages[0].texts() == pages[1].texts() and len(pages[0].texts()) > 100
    for page in pages:
        numbers = [int(value) for _, name, value in page.attributes if name.startswith("data-text")]
        assert set(numbers) == set(range(len(page.texts())))
    assert len(json.dumps(pages[0].texts())) < 200_000
