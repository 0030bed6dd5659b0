"""The picture of a measurement, as PNG: curves along an axis, else the repeats of each figure, the median marked.

A diamond, or a dashed line, is what was planned; not beside simulated devices, which are as slow as the processor.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

from anabatic.bench.measurements import (
    AXIS_FORMATTERS,
    SELF_DESCRIBING_UNITS,
    UNIT_FORMATTERS,
    BenchMetric,
    BenchResult,
)
from anabatic.core.axis_ticks import compute_ticks

_TEXT_COLOR, _GRID_COLOR, _POINT_COLOR, _PLAN_COLOR = "#1f2328", "#d0d7de", "#2f6fb2", "#d9822b"


def render_png(result: BenchResult) -> bytes:
    """Draw a result."""
    import matplotlib

    matplotlib.use("Agg")  # no window, no display
    import matplotlib.pyplot as plt

    panels = list(_group_into_panels(result))
    draw = _draw_curves if result.axis else _draw_points
    high = [len(panel) + 1.0 for panel in panels]
    size = (5.2 * len(panels), 3.8) if result.axis else (7.5, 0.7 + 0.45 * sum(high))
    heights = None if result.axis else high
    across = (1, len(panels)) if result.axis else (len(panels), 1)
    figure, axes = plt.subplots(*across, figsize=size, height_ratios=heights, squeeze=False, layout="constrained")
    for place, panel in zip(axes.flat, panels, strict=True):
        draw(place, panel, result.axis, not result.machine["simulated"])
        place.spines[["top", "right"]].set_visible(False)
        place.grid(color=_GRID_COLOR, linewidth=0.6)
        place.set_axisbelow(True)
    figure.suptitle(result.title, fontsize=10, color=_TEXT_COLOR, wrap=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()


def _draw_curves(axes: Any, panel: list[BenchMetric], axis: str, plans: bool) -> None:
    unit = panel[0].unit
    for name in dict.fromkeys(one.name for one in panel):
        line = sorted((one for one in panel if one.name == name), key=lambda one: one.axis_value or 0.0)
        at = [one.axis_value or 0.0 for one in line]
        (drawn,) = axes.plot(at, [one.median for one in line], "o-", label=name, markersize=4)
        axes.fill_between(
            at,
            [min(one.values) for one in line],
            [max(one.values) for one in line],
            alpha=0.15,
            color=drawn.get_color(),
        )
        if plans and all(one.planned_value is not None for one in line):
            planned = [one.planned_value for one in line]
            axes.plot(at, planned, "--", color=drawn.get_color(), linewidth=1, label=f"{name}, planned")
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [AXIS_FORMATTERS[axis](place) for place in at])
    axes.minorticks_off()
    axes.set_xlabel(axis)
    if axis == "devices" and unit == "x":
        axes.plot(
            at, [place / at[0] for place in at], ":", color=_TEXT_COLOR, linewidth=1, label="as many times as devices"
        )
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, _: UNIT_FORMATTERS[unit](value))
    axes.set_ylabel("" if unit in SELF_DESCRIBING_UNITS else unit)
    axes.legend(fontsize=8, frameon=False)


def _group_into_panels(result: BenchResult) -> Iterator[list[BenchMetric]]:
    """Yield what shares a scale: along an axis the figures of a unit; else those whose names begin alike.

    One value has no range, and stands in the table alone.
    """
    if result.axis:
        for unit in dict.fromkeys(one.unit for one in result.metrics if one.unit != "tokens"):
            yield [one for one in result.metrics if one.unit == unit]
        return
    shown = [one for one in result.metrics if len(one.values) > 1] or list(result.metrics)
    for key in dict.fromkeys(map(_panel_key, shown)):
        yield [one for one in shown if _panel_key(one) == key]


def _byte_ticks(high: float) -> list[float]:
    """Return round numbers of KiB, MiB or GiB up to so many bytes."""
    unit = 1024.0 ** int(math.log(max(high, 1.0), 1024))
    return [unit * number for number in compute_ticks(0.0, high / unit, 5)]


def _panel_key(one: BenchMetric) -> tuple[str, str]:
    return one.name.partition(",")[0], one.unit


def _draw_points(axes: Any, panel: list[BenchMetric], _: str, plans: bool) -> None:
    unit = panel[0].unit
    for place, one in enumerate(reversed(panel)):
        axes.plot(
            one.values, [place] * len(one.values), "o", color=_POINT_COLOR, alpha=0.45, markersize=6, clip_on=False
        )
        axes.plot([one.median], [place], "|", color=_TEXT_COLOR, markersize=14, markeredgewidth=2, clip_on=False)
        if plans and one.planned_value is not None:
            axes.plot([one.planned_value], [place], "D", color=_PLAN_COLOR, markersize=5, clip_on=False)
    shown = "" if unit in SELF_DESCRIBING_UNITS else f", {unit}"
    axes.set_yticks(range(len(panel)), [f"{one.name}{shown}" for one in reversed(panel)])
    axes.set_ylim(-0.6, len(panel) - 0.4)
    axes.set_xlim(left=0)
    if unit == "B":
        axes.set_xticks(_byte_ticks(axes.get_xlim()[1]))
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: UNIT_FORMATTERS[unit](value) if value else "0")
    axes.tick_params(labelsize=8)
