"""The picture of a measurement, as PNG: curves along an axis, else the repeats of each figure."""

from __future__ import annotations

import io
from typing import Any

from anabatic.bench.figures import AXES, UNITS, Figure, Result

_INK, _GRID, _POINT, _PLAN = "#1f2328", "#d0d7de", "#2f6fb2", "#d9822b"


def png(result: Result) -> bytes:
    """Draw a result."""
    import matplotlib

    matplotlib.use("Agg")  # no window, no display
    import matplotlib.pyplot as plt

    units = list(dict.fromkeys(one.unit for one in result.figures))
    panels = [[one for one in result.figures if one.unit == unit] for unit in units]
    draw = _curves if result.axis else _points
    wide, high = 5.2 * len(panels), 1.1 + 0.45 * len(result.figures) + 0.5 * len(panels)
    figure, axes = plt.subplots(
        1 if result.axis else len(panels), len(panels) if result.axis else 1,
        figsize=(wide, 3.8) if result.axis else (7.5, high),
        height_ratios=None if result.axis else [len(panel) + 0.6 for panel in panels],
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for place, panel in zip(axes.flat, panels, strict=True):
        draw(place, panel, result.axis)
        place.spines[["top", "right"]].set_visible(False)
        place.grid(color=_GRID, linewidth=0.6)
        place.set_axisbelow(True)
    figure.suptitle(result.title, fontsize=10, color=_INK, wrap=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()


def _curves(axes: Any, panel: list[Figure], axis: str) -> None:
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
        if all(one.planned is not None for one in line):
            planned = [one.planned for one in line]
            axes.plot(at, planned, "--", color=drawn.get_color(), linewidth=1, label=f"{name}, planned")
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [AXES[axis](place or 0.0) for place in at])
    axes.minorticks_off()
    axes.set_xlabel(axis)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: UNITS[unit](value))
    axes.set_ylabel("" if unit in ("s", "B", "B/s", "share") else "times" if unit == "x" else unit)
    axes.legend(fontsize=8, frameon=False)


def _points(axes: Any, panel: list[Figure], _: str) -> None:
    unit = panel[0].unit
    for place, one in enumerate(reversed(panel)):
        axes.plot(one.values, [place] * len(one.values), "o", color=_POINT, alpha=0.45, markersize=6, clip_on=False)
        axes.plot([one.median], [place], "|", color=_INK, markersize=16, markeredgewidth=2)
        if one.planned is not None:
            axes.plot([one.planned], [place], "D", color=_PLAN, markersize=5, label="planned")
    axes.set_yticks(range(len(panel)), [one.name for one in reversed(panel)])
    axes.set_ylim(-0.6, len(panel) - 0.4)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: UNITS[unit](value) if value else "0")
    axes.set_xlabel("" if unit in ("s", "B", "B/s", "share") else unit)
    axes.tick_params(labelsize=8)
