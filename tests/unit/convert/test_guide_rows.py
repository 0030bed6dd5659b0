"""Every row of the page of guides promises something that a test runs, or gives a reason; every command has a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.vessels import SHAPE, write_demo, write_table
from npu_sim.guides import page, small, typed
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


@pytest.mark.parametrize("name", page.NAMES)
def test_what_a_guide_has_typed_has_a_counterpart_that_is_run(name: str) -> None:
    """A command is in the table, whose tests run it; what is not is an option, a variable, or needs nothing here."""
    if name not in typed.guides():
        pytest.skip("the guides for Ascend are not beside the checkout")
    lines, table = typed.lines_of(typed.guides()[name]), typed.COUNTERPARTS[name]
    assert not set(table) - set(lines), "no guide has these"
    for line in lines:
        rows = typed.rows_of(line, name)
        assert rows, f"no row of the page names: {line}"
        assert line in table or line.startswith(typed.SETS) or all(map(typed.needs_nothing, rows)), line


def test_the_table_has_every_command_of_the_guides() -> None:
    """59 commands, 54 of them different; beside them 27 options and variables, and 33 lines that need nothing here."""
    lines = [line for table in typed.COUNTERPARTS.values() for line in table]
    assert (len(lines), len(set(lines))) == (59, 54)
    assert all(typed.rows_of(line, name) for name, table in typed.COUNTERPARTS.items() for line in table)
    if typed.guides():
        assert sum(len(typed.lines_of(text)) for text in typed.guides().values()) == 59 + 27 + 33


def test_files_of_our_own_have_the_shape_of_the_guides(shared_data: Path, tmp_path: Path) -> None:
    """They take the place of the guides' files where those are not beside the checkout."""
    source = shared_data / "ais" / "source_demo"
    for name, (label, segments) in SHAPE.items():
        ours = tmp_path / f"{name}.csv"
        write_table(ours)
        tables = [path.read_text(encoding="utf-8").splitlines() for path in (ours, source / ours.name)]
        assert tables[0][0] == tables[1][0]
        assert all(abs((len(table) - 1) // 30 - segments) <= 1 for table in tables)  # a short rest is a segment or none
        points = [dict(zip(table[0].split(","), table[1].split(","), strict=True)) for table in tables]
        assert {(len(point["date"]), len(point["H3"]), point["class"]) for point in points} == {(19, 15, f"{label}.0")}
    write_demo(tmp_path / "rows.jsonl")
    files = (tmp_path / "rows.jsonl", source / "train_dataset_demo.jsonl")
    rows = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in files]
    shapes = [sorted((row["source_file"], row["label"], *row) for row in some) for some in rows]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 65
    words = [[word.partition("_")[0] for word in some[0]["text"].split()] for some in rows]
    assert words[0] == words[1]


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
