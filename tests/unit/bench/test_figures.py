"""Figures, tables, files and pictures of a measurement."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.bench import environment_info, result_files
from anabatic.bench.measurements import UNIT_FORMATTERS, BenchMetric, BenchResult
from anabatic.config.bench import BenchJob
from anabatic.core.errors import ConfigError, Failure

VALUES = st.lists(st.floats(1e-7, 1e13), min_size=1, max_size=9).map(tuple)


def result(figures: list[BenchMetric], axis: str = "") -> BenchResult:
    return BenchResult(
        "train", "a | title", figures, {"repeats": 3}, environment_info.collect_environment(0.5), axis, ["a note"]
    )


@given(st.sampled_from(sorted(UNIT_FORMATTERS)), VALUES)
def test_a_figure_is_its_values_median(unit: str, values: tuple[float, ...]) -> None:
    one = BenchMetric("x", unit, values)
    data = json.loads(json.dumps(one.to_dict()))
    assert data["median"] == statistics.median(values) and data["values"] == list(values)
    assert data["low"] <= data["median"] <= data["high"]
    assert one.format_value(one.median) and (" - " in one.value_range) == (len(values) > 1)


def test_a_figure_without_values_is_no_figure() -> None:
    with pytest.raises(Failure, match="speed was not measured once"):
        BenchMetric("speed", "x", ())


def test_a_table_has_only_the_columns_that_are_filled() -> None:
    rows = result(
        [BenchMetric("tokens", "tokens/s", (100.0, 300.0, 200.0), 400.0), BenchMetric("step", "s", (0.25,))]
    ).build_table()
    assert rows[0] == ["", "median", "range", "planned", "of it"]
    assert rows[1] == ["tokens, tokens/s", "200", "100 - 300", "400", "0.50"]
    assert rows[2] == ["step", "250 ms", "", "", ""]
    bare = result([BenchMetric("step", "s", (0.25,))]).build_table()
    assert bare == [["", "median"], ["step", "250 ms"]]


def test_a_table_along_an_axis_has_a_row_for_each_place() -> None:
    figures = [
        BenchMetric("speed-up", "x", (1.0,), 1.0, 1.0),
        BenchMetric("tokens/s", "tokens/s", (50.0,), None, 1.0),
        BenchMetric("speed-up", "x", (1.9,), 1.8, 2.0),
    ]
    rows = result(figures, "devices").build_table()
    assert rows == [
        ["devices", "speed-up", "speed-up, planned", "tokens/s"],
        ["1", "1.00", "1.00", "50"],
        ["2", "1.90", "1.80", ""],
    ]


def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra trajectory)")
    curves = [BenchMetric("all_reduce", "B/s", (1e9 * at, 2e9), 3e9, at) for at in (1.0, 2.0, 1024.0)]
    points = [BenchMetric("tokens", "tokens/s", (100.0, 120.0), 90.0), BenchMetric("MFU", "share", (0.31, 0.3))]
    for name, figures, axis in (("curves", curves, "bytes"), ("points", points, "")):
        job = BenchJob(out=str(tmp_path / name), plot="on")
        assert result_files.prepare_output(job) >= 0
        result_files.write_results(job, result(figures, axis))
        shown = capsys.readouterr().out
        assert shown.startswith("a | title\n") and shown.endswith("a note\n")
        assert json.loads((tmp_path / name / "bench.json").read_text())["figures"][0]["unit"] == figures[0].unit
        page = (tmp_path / name / "bench.md").read_text()
        assert "| " + " | ".join(result(figures, axis).build_table()[1]) + " |" in page and "repeats: 3" in page
        assert (tmp_path / name / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds the figures of an earlier measurement") as caught:
        result_files.prepare_output(BenchJob(out=str(tmp_path)))
    assert "--overwrite" in caught.value.hint
    result_files.prepare_output(BenchJob(out=str(tmp_path), overwrite=True))


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="matplotlib is not installed") as caught:
        result_files.prepare_output(BenchJob(out=str(tmp_path), plot="on"))
    assert "anabatic[trajectory]" in caught.value.hint and not list(tmp_path.iterdir())
    job = BenchJob(out=str(tmp_path))
    result_files.prepare_output(job)
    result_files.write_results(job, result([BenchMetric("step", "s", (1.0,))]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


def test_a_busy_machine_is_noted() -> None:
    quiet, busy = environment_info.collect_environment(0.0), environment_info.collect_environment(1000.0)
    assert not environment_info.caveat_notes({**quiet, "simulated": False})
    assert "a load of 1000" in environment_info.caveat_notes(busy)[-1]
    assert environment_info.SIMULATED_NOTE in environment_info.caveat_notes({**quiet, "simulated": True})
