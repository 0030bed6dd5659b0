"""Results of several evaluations as rows: scores beside chance, which one is best, damaged files."""

from __future__ import annotations

from anabatic_studio.evaluations import MISSING, compare_evaluations
from unit.fake_runs import EVAL_RESULTS


def result(value, low=None, high=None, chance=0.25, n=100, model="m"):
    figure = {"value": value, "low": low, "high": high}
    task = {"metric": "exact", "accuracy": value, "chance": chance, "n": n, "shots": 0, "metrics": {"exact": figure}}
    return {"model": model, "tasks": {"piqa": task}}


def test_rows_are_figures_and_columns_are_runs():
    model, row = compare_evaluations([result(0.5, 0.4, 0.6, model="a"), {}, result(0.8, 0.7, 0.9, n=50, model="b")])
    assert model == {"name": "model", "values": ["a", MISSING, "b"], "best": None, "facts": []}
    assert row["values"] == ["50.0 % (40.0 – 60.0)", MISSING, "80.0 % (70.0 – 90.0)"]
    assert row["facts"] == [["chance", "25.0 %"], ["items", "100 / 50"]]
    assert row["best"] == 2


def test_the_best_is_marked_only_where_its_interval_lies_beyond_the_others():
    assert compare_evaluations([result(0.5, 0.4, 0.6), result(0.55, 0.45, 0.65)])[1]["best"] is None
    assert compare_evaluations([result(0.9, 0.8, 1.0)])[1]["best"] is None
    assert compare_evaluations([result(0.9, 0.8, 1.0), result(0.7, 0.6, 0.8)])[1]["best"] == 0


def test_fewer_bits_and_less_perplexity_are_better():
    bits = [{"bits_per_byte": {"model": value, "gzip9": 2.0}} for value in (1.5, 1.2)]
    row = compare_evaluations(bits)[1]
    assert (row["values"], row["best"], row["facts"]) == (["1.5", "1.2"], 1, [["gzip -9", "2"]])
    figures = [{"perplexity": {"value": value, "low": value - 1, "high": value + 1}} for value in (10, 20)]
    row = compare_evaluations([{"tasks": {"w": {"metric": "perplexity", "metrics": each}}} for each in figures])[1]
    assert (row["values"], row["best"]) == (["10 (9 – 11)", "20 (19 – 21)"], 0)


def test_groups_and_older_files_without_intervals():
    rows = {row["name"]: row for row in compare_evaluations([{**EVAL_RESULTS, "groups": {"core": {"value": 0.25}}}])}
    assert list(rows) == ["model", "bits per byte", "spelling", "counting", "arithmetic", "identity", "core"]
    assert rows["spelling"]["values"] == ["94.5 %"]
    assert rows["core"]["values"] == ["0.25"]


def test_damaged_and_hostile_results_leave_the_rest():
    damaged = [
        {},
        {"tasks": [], "bits_per_byte": 3, "groups": None},
        {"tasks": {"a": 1, "b": {"metric": ["x"], "metrics": {"m": 1}}, "c": {"accuracy": float("nan")}}},
        {"bits_per_byte": {"model": "1.5"}, "groups": {"g": {"value": None}}},
    ]
    assert compare_evaluations(damaged) == []
    assert compare_evaluations([]) == []
    rows = compare_evaluations([{**result(0.5, 0.9, 0.1), "model": "x" * 10_000}])
    assert rows[1]["values"] == ["50.0 %"] and len(rows[0]["values"][0]) == 200
