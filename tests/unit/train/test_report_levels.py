"""The curriculum in the report: shares of what was drawn, whatever is missing or torn."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from anabatic.train.report.charts import FIRST_COLOUR, MAX_COLUMNS, NUM_COLOURS, draw_levels_chart
from anabatic.train.report.page import write_run_report
from anabatic.train.report.run_data import LevelCounts, read_run
from unit.fake_runs import LEVEL_MIXES, write_jsonl, write_training_run

rows = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(0, 9)), max_size=200)


def made(given_rows: list[tuple[int, int, int]]) -> list[LevelCounts]:
    draws, easy, hard = [], 0.0, 0.0
    for step, (stage, more_easy, more_hard) in enumerate(sorted(given_rows), 1):
        easy, hard = easy + more_easy, hard + more_hard
        draws.append(LevelCounts(step, stage, {"easy": easy, "hard": hard}))
    return draws


@given(rows)
def test_columns_are_full_and_in_the_picture(given_rows: list[tuple[int, int, int]]) -> None:
    draws = made(given_rows)
    drawn = draw_levels_chart(draws, (1, len(draws)) if draws else None)
    assert (drawn is None) == (not draws or not sum(draws[-1].samples.values()))
    if drawn is None:
        return
    numbers = [float(word) for path in drawn.paths for word in re.findall(r"\d+(?:\.\d+)?", path.d)]
    assert all(-0.1 <= value <= 1000.1 for value in numbers)
    heights = [
        float(low) - float(top) for path in drawn.paths for low, top in re.findall(r" ([\d.]+)H[\d.]+V([\d.]+)", path.d)
    ]
    columns = len(drawn.data["series"][0]["step"])
    assert abs(sum(heights) - 1000 * columns) < 0.3 * len(heights) and columns <= MAX_COLUMNS + 3
    assert len(drawn.marks) == len({draw.stage for draw in draws}) - 1


def test_shares_are_those_of_the_stretch_not_of_the_run() -> None:
    draws = [
        LevelCounts(10, 1, {"easy": 8.0, "hard": 0.0}),
        LevelCounts(20, 2, {"easy": 8.0, "hard": 4.0}),
        LevelCounts(30, 2, {"easy": 9.0, "hard": 7.0}),
    ]
    drawn = draw_levels_chart(draws, (1, 30))
    assert drawn is not None
    assert [one["text"] for one in drawn.data["series"]] == [["100%", "0%", "25%"], ["0%", "100%", "75%"]]
    assert [(path.name.en, path.last) for path in drawn.paths] == [("easy", "9"), ("hard", "7")]
    assert [(x, mark.en) for x, mark in drawn.marks] == [(1000 * 10 / 30 / 10, "stage 2")]


def test_any_number_of_levels() -> None:
    for count in (1, 2, 8, 20):
        drawn = draw_levels_chart([LevelCounts(5, 1, {str(n): 2.0 for n in range(count)})], None)
        assert drawn is not None
        colours = [path.colour for path in drawn.paths]
        assert len(set(colours)) == min(count, NUM_COLOURS)
        assert set(colours) <= set(range(FIRST_COLOUR, FIRST_COLOUR + NUM_COLOURS))


def test_a_run_with_a_curriculum(tmp_path: Path) -> None:
    write_training_run(tmp_path / "sft", steps=60, levels=True)
    run = read_run(tmp_path / "sft", "sft")
    assert len(run.level_counts) == 60 and list(run.level_counts[-1].samples) == list(LEVEL_MIXES)
    page = write_run_report(tmp_path / "sft").read_text(encoding="utf-8")
    assert "Levels of the curriculum" in page and "stage 2" in page and "stage 3" in page


def test_torn_rows_are_passed_over(tmp_path: Path) -> None:
    bad = [
        {"step": 1, "kind": "train", "loss": 1.0, "stage": 1, "samples": [1, 2]},
        {"step": 2, "kind": "train", "loss": 1.0, "stage": "x", "samples": {"a": 1}},
        {"step": 3, "kind": "train", "loss": 1.0, "stage": 1, "samples": {"a": "many", "b": float("nan")}},
        {"step": 4, "kind": "train", "loss": 1.0, "stage": 1, "samples": {"<hr>": 3}},
    ]
    write_jsonl(tmp_path / "run" / "metrics.jsonl", bad)
    assert [draw.step for draw in read_run(tmp_path / "run", "run").level_counts] == [4]
    page = write_run_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "&lt;hr&gt;" in page and "<hr>" not in page
