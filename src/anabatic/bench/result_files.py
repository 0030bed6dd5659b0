"""Results of `anabatic bench`: a table in the terminal, `bench.json`, `bench.md`, `bench.svg`."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from anabatic import __version__
from anabatic.bench.measurements import (
    AXIS_FORMATTERS,
    SELF_DESCRIBING_UNITS,
    UNIT_FORMATTERS,
    BenchMetric,
    BenchResult,
)
from anabatic.config.bench import BenchJob
from anabatic.core import log, svg_plot
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import align_columns, format_markdown_row, format_size
from anabatic.core.json_reader import replace_nonfinite
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.core.svg_plot import make_linear_axis

JSON_FILE, MARKDOWN_FILE, PLOT_FILE = "bench.json", "bench.md", "bench.svg"


def prepare_output(job: BenchJob) -> float:
    """Make sure that figures can be written, before minutes are spent on them; return the machine's load.

    Raises:
        ConfigError: the folder holds figures.
        Failure: the folder cannot be written.
    """
    folder = Path(job.out).expanduser()
    if (folder / JSON_FILE).exists() and not job.overwrite:
        raise ConfigError(
            f"{folder} holds the figures of an earlier measurement", "choose another --out, or --overwrite"
        )
    RunFolder(folder).create_folder()
    return os.getloadavg()[0]


def write_results(job: BenchJob, result: BenchResult) -> None:
    """Write the files, and the table to the standard output.

    Raises:
        Failure: the folder cannot be written.
    """
    folder = Path(job.out).expanduser()
    write_atomic(folder / MARKDOWN_FILE, format_markdown(result))
    names = [MARKDOWN_FILE]
    if job.plot != "off":
        write_atomic(folder / PLOT_FILE, render_svg(result))
        names.append(PLOT_FILE)
    write_atomic(
        folder / JSON_FILE, json.dumps(replace_nonfinite(result.to_dict()), indent=2, ensure_ascii=False) + "\n"
    )
    sys.stdout.write(format_text(result))
    log.info(f"wrote {', '.join([JSON_FILE, *names])} into {folder}")


def format_text(result: BenchResult) -> str:
    """Return what is shown in a terminal."""
    rows = result.build_table()
    lines = [result.title, _describe_machine(result), "", *align_columns(rows, range(1, len(rows[0])))]
    return "\n".join([*lines, *([""] if result.notes else []), *result.notes]) + "\n"


def format_markdown(result: BenchResult) -> str:
    """Return the page: what, where, the table, the command."""
    head, *rows = result.build_table()
    lines = [
        f"# bench {result.kind}",
        "",
        f"{result.title}.",
        "",
        format_markdown_row(head),
        "|" + "---|" * len(head),
        *map(format_markdown_row, rows),
        "",
        *(f"- {note}" for note in result.notes),
        *([""] if result.notes else []),
        f"{_describe_machine(result)}.",
        "",
    ]
    machine = {name: value for name, value in result.machine.items() if name not in ("device", "devices")}
    lines += ["```text", *(f"{name}: {value}" for name, value in {**machine, **result.settings}.items()), "```", ""]
    return "\n".join(lines)


def _describe_machine(result: BenchResult) -> str:
    machine = result.machine
    several = "{} processes on " if machine["device"] == machine["processor"] else "{} x "
    count = several.format(machine["devices"]) if machine["devices"] > 1 else ""
    simulated = ", simulated" if machine["simulated"] else ""
    lines = (
        f"{machine['cores']} cores, {format_size(machine['memory_bytes'])}, a load of {machine['load_before']:g} before"
    )
    return (
        f"{count}{machine['device']}{simulated}; {lines}; torch {machine.get('torch', 'none')}, anabatic {__version__}"
    )


_CURVES_WIDTH, _CURVES_HEIGHT = 560.0, 400.0
_POINTS_WIDTH, _ROW_HEIGHT = 900.0, 34.0
_LETTER_PIXELS, _TITLE_LETTER_PIXELS = 7.0, 8.5
"""Width of a letter, about; words of a plot are 12 to 14 pixels high."""
_LINE_PIXELS = 20.0
_MAX_AXIS_LABELS = 9

_LegendRow = tuple[str, str, str]
_POINTS_LEGEND: list[_LegendRow] = [
    ("circle", "faint c0", "one repeat"),
    ("bar", "line ink", "median"),
    ("diamond", "full c1", "planned"),
]


def render_svg(result: BenchResult) -> str:
    """Draw a result."""
    groups = list(_group_into_panels(result))
    is_planned = not result.machine["simulated"]
    width = _CURVES_WIDTH * len(groups) if result.axis else _POINTS_WIDTH
    title = textwrap.wrap(result.title, int((width - 40) / _TITLE_LETTER_PIXELS))
    top = _LINE_PIXELS * (len(title) + 0.5)
    parts = [svg_plot.render_text(20, _LINE_PIXELS * (n + 1), line, "title") for n, line in enumerate(title)]
    if result.axis:
        panels = [
            _draw_curves(group, result.axis, is_planned, place * _CURVES_WIDTH, top)
            for place, group in enumerate(groups)
        ]
        height = top + _CURVES_HEIGHT
        for panel, legend in panels:
            parts += [panel.render_panel(), svg_plot.render_legend(legend, panel.left + svg_plot.LEFT, height + 14)]
        height += _LINE_PIXELS * max(len(legend) for _, legend in panels)
    else:
        height = top
        label_width = 20 + _LETTER_PIXELS * max(len(_row_label(one)) for group in groups for one in group)
        for group in groups:
            panel = _draw_points(group, is_planned, height, min(label_width, _POINTS_WIDTH / 2))
            parts.append(panel.render_panel())
            height += panel.height - svg_plot.TOP  # none has a title
        has_plan = is_planned and any(one.planned_value is not None for group in groups for one in group)
        legend = _POINTS_LEGEND if has_plan else _POINTS_LEGEND[:-1]
        parts.append(svg_plot.render_legend(legend, 20, height + 2 * _LINE_PIXELS))
        height += _LINE_PIXELS * (len(legend) + 2)
    return svg_plot.render_document(parts, width + svg_plot.RIGHT, height, result.title)


def _group_into_panels(result: BenchResult) -> Iterator[list[BenchMetric]]:
    """Yield what shares a scale: along an axis the figures of a unit; else those whose names begin alike.

    One value has no range, and stands in the table alone.
    """
    if result.axis:
        units = dict.fromkeys(one.unit for one in result.metrics)
        for unit in [one for one in units if one != "tokens"] or units:
            yield [one for one in result.metrics if one.unit == unit]
        return
    plotted = [one for one in result.metrics if len(one.values) > 1] or list(result.metrics)
    for key in dict.fromkeys(map(_panel_key, plotted)):
        yield [one for one in plotted if _panel_key(one) == key]


def _panel_key(one: BenchMetric) -> tuple[str, str]:
    return one.name.partition(",")[0], one.unit


def _row_label(one: BenchMetric) -> str:
    return one.name if one.unit in SELF_DESCRIBING_UNITS else f"{one.name}, {one.unit}"


def _make_value_axis(label: str, unit: str, maximum: float, about: int, has_grid: bool = False) -> svg_plot.PlotAxis:
    """Return an axis from 0 to a little above `maximum`; bytes have round numbers of KiB, MiB or GiB."""
    high = 1.08 * (maximum or 1.0)
    scale = 1024.0 ** int(math.log(max(high, 1.0), 1024)) if unit == "B" else 1.0
    write = UNIT_FORMATTERS[unit]
    return make_linear_axis(
        label, high, about, lambda number: write(number) if number else "0", scale=scale, has_grid=has_grid
    )


def _make_place_axis(name: str, places: Sequence[float]) -> svg_plot.PlotAxis:
    """Return the axis that figures were measured along; one place alone stands in its middle."""
    low, high = (places[0], places[-1]) if len(places) > 1 else (places[0] / 2, places[0] * 2)
    labelled = places[:: 1 + (len(places) - 1) // _MAX_AXIS_LABELS]
    return svg_plot.PlotAxis(
        name, low, high, [(place, AXIS_FORMATTERS[name](place)) for place in labelled], is_log=True
    )


def _draw_curves(
    group: list[BenchMetric], axis: str, is_planned: bool, left: float, top: float
) -> tuple[svg_plot.PlotPanel, list[_LegendRow]]:
    """Return the panel of the figures of one unit, and what its lines mean."""
    unit = group[0].unit
    write: Callable[[float], str] = UNIT_FORMATTERS[unit]
    places = sorted({one.axis_value or 0.0 for one in group})
    ideal = [(place, place / places[0]) for place in places] if axis == "devices" and unit == "x" else []
    planned_values = [one.planned_value for one in group if is_planned and one.planned_value is not None]
    maximum = max([*(value for one in group for value in one.values), *planned_values, *(value for _, value in ideal)])
    panel = svg_plot.PlotPanel(
        _make_place_axis(axis, places),
        _make_value_axis("" if unit in SELF_DESCRIBING_UNITS else unit, unit, maximum, 6),
        left=left,
        top=top,
        width=_CURVES_WIDTH,
        height=_CURVES_HEIGHT,
    )
    legend: list[_LegendRow] = []
    for number, name in enumerate(dict.fromkeys(one.name for one in group)):
        colour = f"c{1 + number % svg_plot.NUM_COLOURS}"
        curve = sorted((one for one in group if one.name == name), key=lambda one: one.axis_value or 0.0)
        panel.draw_band([(one.axis_value or 0.0, min(one.values), max(one.values)) for one in curve], colour)
        legend.append(("circle", f"full {colour}", name))
        planned = [(one.axis_value or 0.0, one.planned_value) for one in curve if one.planned_value is not None]
        if is_planned and len(planned) == len(curve):
            panel.draw_line(planned, f"thin {colour}")
            legend.append(("line", f"thin {colour}", f"{name}, planned"))
        panel.draw_line([(one.axis_value or 0.0, one.median) for one in curve], f"line {colour}")
        for one in curve:
            hover_text = f"{name}, {AXIS_FORMATTERS[axis](one.axis_value or 0.0)}: {write(one.median)}"
            panel.draw_mark(one.axis_value or 0.0, one.median, "circle", f"full {colour}", hover_text)
    if ideal:
        panel.draw_line(ideal, "dash")
        legend.append(("line", "dash", "as many times as devices"))
    return panel, legend


def _draw_points(group: list[BenchMetric], is_planned: bool, top: float, label_width: float) -> svg_plot.PlotPanel:
    """Return the panel of figures that share a scale: a row for each, with its repeats as dots."""
    unit = group[0].unit
    planned = [one.planned_value for one in group if is_planned and one.planned_value is not None]
    rows = [(float(place), one) for place, one in enumerate(reversed(group))]
    names = svg_plot.PlotAxis("", -0.6, len(group) - 0.4, [(place, _row_label(one)) for place, one in rows])
    panel = svg_plot.PlotPanel(
        _make_value_axis("", unit, max([*(value for one in group for value in one.values), *planned]), 6, True),
        names,
        top=top,
        width=_POINTS_WIDTH,
        height=svg_plot.TOP + svg_plot.BOTTOM + _ROW_HEIGHT * len(group),
        label_width=label_width,
    )
    for place, one in rows:
        for value in one.values:
            panel.draw_mark(value, place, "circle", "faint c0", one.format_value(value))
        panel.draw_mark(one.median, place, "bar", "line ink", f"median: {one.format_value(one.median)}")
        if is_planned and one.planned_value is not None:
            panel.draw_mark(
                one.planned_value, place, "diamond", "full c1", f"planned: {one.format_value(one.planned_value)}"
            )
    return panel
