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

from anabatic.bench import machine, written
from anabatic.bench.figures import UNITS, Figure, Result
from anabatic.config.bench import BenchJob
from anabatic.core.errors import ConfigError, Failure

VALUES = st.lists(st.floats(1e-7, 1e13), min_size=1, max_size=9).map(tuple)


def result(figures: list[Figure], axis: str = "") -> Result:
    return Result("train", "a | title", figures, {"repeats": 3}, machine.facts(0.5), axis, ["a note"])


@given(st.sampled_from(sorted(UNITS)), VALUES)
def test_a_figure_is_its_values_median(unit: str, values: tuple[float, ...]) -> None:
    one = Figure("x", unit, values)
    data = json.loads(json.dumps(one.data()))
    assert data["median"] == statistics.median(values) and data["values"] == list(values)
    assert data["low"] <= data["median"] <= data["high"]
    assert one.shown(one.median) and (" - " in one.spread) == (len(values) > 1)


def test_a_figure_without_values_is_no_figure() -> None:
    with pytest.raises(Failure, match="speed was not measured once"):
        Figure("speed", "x", ())


def test_a_table_has_only_the_columns_that_are_filled() -> None:
    rows = result([Figure("tokens", "tokens/s", (100.0, 300.0, 200.0), 400.0), Figure("step", "s", (0.25,))]).rows()
    assert rows[0] == ["", "median", "range", "planned", "of it"]
    assert rows[1] == ["tokens, tokens/s", "200", "100 - 300", "400", "0.50"]
    assert rows[2] == ["step", "250 ms", "", "", ""]
    bare = result([Figure("step", "s", (0.25,))]).rows()
    assert bare == [["", "median"], ["step", "250 ms"]]


def test_a_table_along_an_axis_has_a_row_for_each_place() -> None:
    figures = [
        Figure("speed-up", "x", (1.0,), 1.0, 1.0),
        Figure("tokens/s", "tokens/s", (50.0,), None, 1.0),
        Figure("speed-up", "x", (1.9,), 1.8, 2.0),
    ]
    rows = result(figures, "devices").rows()
    assert rows == [
        ["devices", "speed-up", "speed-up, planned", "tokens/s"],
        ["1", "1.00", "1.00", "50"],
        ["2", "1.90", "1.80", ""],
    ]


def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra trajectory)")
    curves = [Figure("all_reduce", "B/s", (1e9 * at, 2e9), 3e9, at) for at in (1.0, 2.0, 1024.0)]
    points = [Figure("tokens", "tokens/s", (100.0, 120.0), 90.0), Figure("MFU", "share", (0.31, 0.3))]
    for name, figures, axis in (("curves", curves, "bytes"), ("points", points, "")):
        job = BenchJob(out=str(tmp_path / name), plot="on")
        assert written.begin(job) >= 0
        written.finish(job, result(figures, axis))
        shown = capsys.readouterr().out
        assert shown.startswith("a | title\n") and shown.endswith("a note\n")
        assert json.loads((tmp_path / name / "bench.json").read_text())["figures"][0]["unit"] == figures[0].unit
        page = (tmp_path / name / "bench.md").read_text()
        assert "| " + " | ".join(result(figures, axis).rows()[1]) + " |" in page and "repeats: 3" in page
        assert (tmp_path / name / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_figures_are_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds the figures of an earlier measurement") as caught:
        written.begin(BenchJob(out=str(tmp_path)))
    assert "--overwrite" in caught.value.hint
    written.begin(BenchJob(out=str(tmp_path), overwrite=True))


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="matplotlib is not installed") as caught:
        written.begin(BenchJob(out=str(tmp_path), plot="on"))
    assert "anabatic[trajectory]" in caught.value.hint and not list(tmp_path.iterdir())
    job = BenchJob(out=str(tmp_path))
    written.begin(job)
    written.finish(job, result([Figure("step", "s", (1.0,))]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


def test_a_busy_machine_is_noted() -> None:
    quiet, busy = machine.facts(0.0), machine.facts(1000.0)
    assert not machine.notes({**quiet, "simulated": False})
    assert "a load of 1000" in machine.notes(busy)[-1]
    assert machine.SIMULATED in machine.notes({**quiet, "simulated": True})
