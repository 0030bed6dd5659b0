"""The picture of a measurement, as PNG: curves along an axis, else the repeats of each figure, the median marked.

A diamond, or a dashed line, is what was planned; not beside simulated devices, which are as slow as the processor.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from anabatic.bench.figures import AXES, PLAIN, UNITS, Figure, Result

_INK, _GRID, _POINT, _PLAN = "#1f2328", "#d0d7de", "#2f6fb2", "#d9822b"


def png(result: Result) -> bytes:
    """Draw a result."""
    import matplotlib

    matplotlib.use("Agg")  # no window, no display
    import matplotlib.pyplot as plt

    panels = list(_panels(result))
    draw = _curves if result.axis else _points
    size = (5.2 * len(panels), 3.8) if result.axis else (7.5, 0.9 + 0.95 * len(panels))
    across = (1, len(panels)) if result.axis else (len(panels), 1)
    figure, axes = plt.subplots(*across, figsize=size, squeeze=False, layout="constrained")
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
        at = [one.at for one in line]
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
    axes.set_xticks(at, [AXES[axis](place or 0.0) for place in at])
    axes.minorticks_off()
    axes.set_xlabel(axis)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: UNITS[unit](value))
    axes.set_ylabel("" if unit in PLAIN else unit)
    axes.legend(fontsize=8, frameon=False)


def _panels(result: Result) -> Iterator[list[Figure]]:
    """Yield the figures of one unit along an axis; else each figure that has a range, which one value has not."""
    if not result.axis:
        ranged = [one for one in result.figures if len(one.values) > 1]
        yield from ([one] for one in ranged or result.figures)
        return
    for unit in dict.fromkeys(one.unit for one in result.figures):
        yield [one for one in result.figures if one.unit == unit]


def _points(axes: Any, panel: list[Figure], _: str, plans: bool) -> None:
    (one,) = panel
    axes.plot(one.values, [0] * len(one.values), "o", color=_POINT, alpha=0.45, markersize=6, clip_on=False)
    axes.plot([one.median], [0], "|", color=_INK, markersize=16, markeredgewidth=2)
    if plans and one.planned is not None:
        axes.plot([one.planned], [0], "D", color=_PLAN, markersize=5, clip_on=False)
    unit = "" if one.unit in PLAIN else f", {one.unit}"
    axes.set_yticks([0], [f"{one.name}{unit}"])
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: UNITS[one.unit](value) if value else "0")
    axes.tick_params(labelsize=8)
