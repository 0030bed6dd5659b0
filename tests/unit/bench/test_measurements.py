"""Figures, tables, files and pictures of a measurement."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from xml.etree import ElementTree

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
        picture = ElementTree.parse(tmp_path / name / "bench.svg").getroot()
        words = {each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")}
        assert {"a | title", "1.0 KiB", "200 GB/s", "all_reduce, planned"} <= words if axis else "MFU" in words


def test_figures_are_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds the figures of an earlier measurement") as caught:
        result_files.prepare_output(BenchJob(out=str(tmp_path)))
    assert "--overwrite" in caught.value.hint
    result_files.prepare_output(BenchJob(out=str(tmp_path), overwrite=True))


def test_a_picture_may_be_left_out(tmp_path: Path) -> None:
    job = BenchJob(out=str(tmp_path), plot="off")
    result_files.prepare_output(job)
    result_files.write_results(job, result([BenchMetric("step", "s", (1.0,))]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


@given(st.sampled_from(sorted(UNIT_FORMATTERS)), st.lists(VALUES, min_size=1, max_size=4), st.booleans())
def test_every_figure_can_be_drawn(unit: str, rows: list[tuple[float, ...]], along: bool) -> None:
    figures = [
        BenchMetric("one" if along else f"row <{n}>", unit, values, None, 2.0**n) for n, values in enumerate(rows)
    ]
    drawn = result_files.render_svg(result(figures, "devices" if along else ""))
    marks = list(ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}path"))
    assert "nan" not in drawn and "inf" not in drawn and len(marks) > len(rows)


def test_a_busy_machine_is_noted() -> None:
    quiet, busy = environment_info.collect_environment(0.0), environment_info.collect_environment(1000.0)
    assert not environment_info.caveat_notes({**quiet, "simulated": False})
    assert "a load of 1000" in environment_info.caveat_notes(busy)[-1]
    assert environment_info.SIMULATED_NOTE in environment_info.caveat_notes({**quiet, "simulated": True})
