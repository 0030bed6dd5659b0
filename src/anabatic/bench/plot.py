"""The picture of a measurement, as PNG: curves along an axis, else the repeats of each figure, the median marked.

A diamond, or a dashed line, is what was planned; not beside simulated devices, which are as slow as the processor.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

from anabatic.bench.figures import AXES, PLAIN, UNITS, Figure, Result
from anabatic.core.axis import ticks

_INK, _GRID, _POINT, _PLAN = "#1f2328", "#d0d7de", "#2f6fb2", "#d9822b"


def png(result: Result) -> bytes:
    """Draw a result."""
    import matplotlib

    matplotlib.use("Agg")  # no window, no display
    import matplotlib.pyplot as plt

    panels = list(_panels(result))
    draw = _curves if result.axis else _points
    high = [len(panel) + 1.0 for panel in panels]
    size = (5.2 * len(panels), 3.8) if result.axis else (7.5, 0.7 + 0.45 * sum(high))
    heights = None if result.axis else high
    across = (1, len(panels)) if result.axis else (len(panels), 1)
    figure, axes = plt.subplots(*across, figsize=size, height_ratios=heights, squeeze=False, layout="constrained")
    for place, panel in zip(axes.flat, panels, strict=True):
        draw(place, panel, result.axis, not result.machine["simulated"])
        place.spines[["top", "right"]].set_visible(False)
        place.grid(color=_GRID, linewidth=0.6)
        place.set_axisbelow(True)
    figure.suptitle(result.title, fontsize=10, color=_INK, wrap=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()


def _curves(axes: Any, panel: list[Figure], axis: str, plans: bool) -> None:
    unit = panel[0].unit
    for name in dict.fromkeys(one.name for one in panel):
        line = sorted((one for one in panel if one.name == name), key=lambda one: one.at or 0.0)
        at = [one.at or 0.0 for one in line]
        (drawn,) = axes.plot(at, [one.median for one in line], "o-", label=name, markersize=4)
        axes.fill_between(
            at,
            [min(one.values) for one in line],
            [max(one.values) for one in line],
            alpha=0.15,
            color=drawn.get_color(),
        )
        if plans and all(one.planned is not None for one in line):
            planned = [one.planned for one in line]
            axes.plot(at, planned, "--", color=drawn.get_color(), linewidth=1, label=f"{name}, planned")
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [AXES[axis](place) for place in at])
    axes.minorticks_off()
    axes.set_xlabel(axis)
    if axis == "devices" and unit == "x":
        axes.plot(at, [place / at[0] for place in at], ":", color=_INK, linewidth=1, label="as many times as devices")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(lambda value, _: UNITS[unit](value))
    axes.set_ylabel("" if unit in PLAIN else unit)
    axes.legend(fontsize=8, frameon=False)


def _panels(result: Result) -> Iterator[list[Figure]]:
    """Yield what shares a scale: along an axis the figures of a unit; else those whose names begin alike.

    One value has no range, and stands in the table alone.
    """
    if result.axis:
        for unit in dict.fromkeys(one.unit for one in result.figures if one.unit != "tokens"):
            yield [one for one in result.figures if one.unit == unit]
        return
    shown = [one for one in result.figures if len(one.values) > 1] or list(result.figures)
    for key in dict.fromkeys(map(_beginning, shown)):
        yield [one for one in shown if _beginning(one) == key]


def _whole(high: float) -> list[float]:
    """Return round numbers of KiB, MiB or GiB up to so many bytes."""
    unit = 1024.0 ** int(math.log(max(high, 1.0), 1024))
    return [unit * number for number in ticks(0.0, high / unit, 5)]


def _beginning(one: Figure) -> tuple[str, str]:
    return one.name.partition(",")[0], one.unit


def _points(axes: Any, panel: list[Figure], _: str, plans: bool) -> None:
    unit = panel[0].unit
    for place, one in enumerate(reversed(panel)):
        axes.plot(one.values, [place] * len(one.values), "o", color=_POINT, alpha=0.45, markersize=6, clip_on=False)
        axes.plot([one.median], [place], "|", color=_INK, markersize=14, markeredgewidth=2, clip_on=False)
        if plans and one.planned is not None:
            axes.plot([one.planned], [place], "D", color=_PLAN, markersize=5, clip_on=False)
    shown = "" if unit in PLAIN else f", {unit}"
    axes.set_yticks(range(len(panel)), [f"{one.name}{shown}" for one in reversed(panel)])
    axes.set_ylim(-0.6, len(panel) - 0.4)
    axes.set_xlim(left=0)
    if unit == "B":
        axes.set_xticks(_whole(axes.get_xlim()[1]))
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: UNITS[unit](value) if value else "0")
    axes.tick_params(labelsize=8)
