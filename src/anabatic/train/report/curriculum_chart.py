"""The curriculum as it was drawn: of every stretch of steps, the share of each level, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from anabatic.train.report.charts import BOX_SIZE, Chart, CurvePath, make_step_ticks
from anabatic.train.report.run_data import LevelCounts

MAX_COLUMNS = 60
"""Stretches at most; more would show the noise of a few samples each."""
FIRST_COLOUR, NUM_COLOURS = 3, 8
"""Classes of the ramp in report.css."""


def draw_levels_chart(draws: Sequence[LevelCounts], steps: tuple[int, int] | None) -> Chart | None:
    """Draw the share of each level over the steps, with a mark where a stage begins.

    Args:
        draws: rows by rising step, each with the samples drawn so far.
        steps: first and last step of the horizontal axis.

    Returns:
        The chart, or None without samples.
    """
    names = list(draws[-1].samples) if draws else []
    columns = _level_columns(draws, names)
    if not columns:
        return None
    low, high = (0, columns[-1][1]) if steps is None else (0, max(steps[1], columns[-1][1]))

    def scale_step(step: float) -> float:
        return BOX_SIZE * (step - low) / (high - low)

    paths = [
        CurvePath(name, f"{draws[-1].samples[name]:,.0f}", "", "", "area", _pick_colour(names, name)) for name in names
    ]
    series: list[dict[str, Any]] = [
        {"name": path.name, "colour": path.colour, "style": "area", "step": [], "x": [], "y": [], "text": []}
        for path in paths
    ]
    for first, last, fractions in columns:
        below = 0.0
        for fraction, path, hover in zip(fractions, paths, series, strict=True):
            bottom, top = (max(0.0, BOX_SIZE * (1 - edge)) for edge in (below, below + fraction))
            if fraction:
                path.d += (
                    f"M{scale_step(first):.1f} {bottom:.1f}H{scale_step(last):.1f}V{top:.1f}H{scale_step(first):.1f}Z"
                )
            hover["step"].append(last)
            hover["x"].append(round(scale_step((first + last) / 2) / 10, 2))
            hover["y"].append(round((bottom + top) / 20, 2))
            hover["text"].append(f"{fraction:.0%}")
            below += fraction
    begins = [(before.step, f"stage {after.stage}") for before, after in pairwise(draws) if after.stage != before.stage]
    latest = ", ".join(f"{path.name} {path.last}" for path in paths)
    return Chart(
        title="Levels of the curriculum, share of the samples",
        last="",
        label=f"Share of each level over the steps 1 to {columns[-1][1]:,}; samples in all: {latest}",
        note="",
        paths=paths,
        x_ticks=make_step_ticks(low, high),
        y_ticks=[(100.0 - fraction, f"{fraction} %") for fraction in (0, 25, 50, 75, 100)],
        marks=[(scale_step(step) / 10, text) for step, text in begins],
        data={"series": series},
        wide=True,
    )


def _level_columns(draws: Sequence[LevelCounts], names: Sequence[str]) -> list[tuple[int, int, list[float]]]:
    """Return (first step, last step, shares) of each stretch; a stretch lies in one stage."""
    stretch = max(1, -(-len(draws) // MAX_COLUMNS))
    columns = []
    begin, before = 0, dict.fromkeys(names, 0.0)
    for number, row in enumerate(draws, 1):
        closes = number == len(draws) or draws[number].stage != row.stage
        if number % stretch and not closes:
            continue
        counts = [max(0.0, row.samples.get(name, 0.0) - before[name]) for name in names]
        if total := sum(counts):
            columns.append((begin, row.step, [each / total for each in counts]))
        begin, before = row.step, {name: row.samples.get(name, 0.0) for name in names}
    return columns


def _pick_colour(names: Sequence[str], name: str) -> int:
    """Spread the levels over the ramp; more of them than it has colours take them in turn."""
    index = names.index(name)
    if len(names) > NUM_COLOURS:
        return FIRST_COLOUR + index % NUM_COLOURS
    return FIRST_COLOUR + round(index * (NUM_COLOURS - 1) / max(1, len(names) - 1))
