"""Every row of the page of guides promises something that a test runs, or says why nothing is to be done."""

from __future__ import annotations

import pytest

from npu_sim.guides import page, small
from npu_sim.guides.values import VALUES

EXECUTED = {"command", "option", "recipe", "setting", "file", "variable", "key", "again", "extra", "python"}
"""Kinds that tests/npu_sim/guides/test_guide_rows.py has a check for."""


@pytest.mark.parametrize("name", page.NAMES)
def test_no_row_is_left_out(name: str) -> None:
    for row in page.chapters()[name].rows:
        assert all(item.kind in EXECUTED for item in row.items), row
        assert row.items or row.reason, f"nothing can be tried, and no reason is given: {row}"


@pytest.mark.parametrize("name", page.NAMES)
def test_settings_have_values_of_the_guide(name: str) -> None:
    named = {item.text for row in page.chapters()[name].rows for item in row.items if item.kind == "setting"}
    assert named == set(VALUES[name])


@pytest.mark.parametrize("name", page.NAMES)
def test_both_languages_promise_the_same(name: str) -> None:
    english, chinese = (page.chapters(language)[name] for language in ("en", "zh"))
    assert english.lines == chinese.lines
    for one, other in zip(english.rows, chinese.rows, strict=True):
        for left, right in ((one.theirs, other.theirs), (one.here, other.here)):
            spans = [span.replace("目录", "FOLDER") for span in page.SPAN.findall(right)]
            assert page.SPAN.findall(left) == spans
        assert bool(one.mind) == bool(other.mind), one


def test_kinds_are_told_apart() -> None:
    spans = {
        "anabatic sft --npus 8": "command",
        "--npus 8": "option",
        "-c qwen-lora": "recipe",
        "rank-0.log": "file",
        "best_model": "file",
        "ASCEND_RT_VISIBLE_DEVICES=0": "variable",
        "lora.r": "setting",
        "out": "setting",
        "pip install 'anabatic[vessels]'": "extra",
        "TrajectoryClassifier": "python",
        "swift sft": "",
        "./train.sh": "",
    }
    assert {span: page.kind_of(span) for span in spans} == spans


def test_a_row_is_covered_by_a_command_that_says_more() -> None:
    line = "anabatic pretrain --model.path runs/base --data texts --npus 8"
    assert page.says(line, "anabatic pretrain")
    assert page.says(line, "anabatic pretrain --model.path FOLDER")
    assert not page.says(line, "anabatic sft")
    assert not page.says(line, "anabatic pretrain --npus 4")


def test_sizes_take_the_place_of_the_pages() -> None:
    words = small.small(["bench", "train", "--", "sft", "--batch.seq-len", "2048", "--npus", "1"])
    assert words[:2] == ["bench", "train"]
    inner = words[words.index("--") + 1 :]
    assert inner[:3] == ["sft", "--batch.seq-len", "64"]
    assert inner[inner.index("--npus") + 1] == "1"
    assert "--schedule.max-steps" in inner
