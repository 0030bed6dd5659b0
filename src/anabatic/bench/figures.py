"""What was measured: values of repeats, their median and range, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabatic.core.errors import Failure
from anabatic.core.text import size


def _seconds(value: float) -> str:
    scale, unit = next((row for row in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if value >= row[0]), (1e-6, "us"))
    return f"{value / scale:.3g} {unit}" if value < 100 else f"{value:,.0f} s"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


UNITS: dict[str, Callable[[float], str]] = {
    "tokens/s": _rate,
    "requests/s": _rate,
    "per second": _rate,
    "tokens": lambda value: f"{value:,.0f}",
    "s": _seconds,
    "B": size,
    "B/s": lambda value: f"{value / 1e9:.3g} GB/s" if value >= 1e9 else f"{value / 1e6:.3g} MB/s",
    "share": lambda value: f"{100 * value:.1f} %",
    "x": lambda value: f"{value:.2f}",
}
"""Unit of a figure -> how its values are written."""
PLAIN = ("s", "B", "B/s", "share", "x")
"""Units that the values show themselves, or that are none."""
AXES: dict[str, Callable[[float], str]] = {"bytes": size, "devices": lambda value: f"{value:.0f}"}
"""What figures of one name differ in -> how it is written."""


@dataclass(frozen=True)
class Figure:
    """One quantity, measured several times.

    Attributes:
        unit: one of `UNITS`.
        values: of the repeats that count.
        planned: what the plan says; None: nothing.
        at: place on the result's axis.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    planned: float | None = None
    at: float | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise Failure(f"{self.name} was not measured once", "run it again; look at the log")

    @property
    def median(self) -> float:
        """Middle of the values."""
        return statistics.median(self.values)

    def shown(self, value: float | None) -> str:
        """Return a value in the figure's unit."""
        return "" if value is None else UNITS[self.unit](value)

    @property
    def spread(self) -> str:
        """Least and most of the values; empty for one."""
        low, high = self.shown(min(self.values)), self.shown(max(self.values))
        return "" if len(self.values) == 1 else f"{low} - {high}"

    def data(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "name": self.name, "unit": self.unit, "at": self.at, "median": self.median, "low": min(self.values),
            "high": max(self.values), "values": list(self.values), "planned": self.planned,
        }  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A measurement of one kind.

    Attributes:
        title: what was measured, in a line.
        settings: of the measurement; machine: where it was made.
        axis: what figures of one name differ in, one of `AXES`; empty: each name comes once.
        notes: what a reader must know.
    """

    kind: str
    title: str
    figures: Sequence[Figure]
    settings: dict[str, Any]
    machine: dict[str, Any]
    axis: str = ""
    notes: Sequence[str] = field(default_factory=tuple)

    def rows(self) -> list[list[str]]:
        """Return the table, its head first: a row a figure, or a row a place on the axis."""
        return self._along() if self.axis else self._each()

    def _each(self) -> list[list[str]]:
        head = ["", "median", "range", "planned", "of it"]
        rows = [head]
        for one in self.figures:
            share = f"{one.median / one.planned:.2f}" if one.planned else ""
            name = one.name if one.unit in PLAIN else f"{one.name}, {one.unit}"
            rows.append([name, one.shown(one.median), one.spread, one.shown(one.planned), share])
        used = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows[1:])]
        return [[row[place] for place in used] for row in rows]

    def _along(self) -> list[list[str]]:
        names = list(dict.fromkeys(one.name for one in self.figures))
        planned = {one.name for one in self.figures if one.planned is not None}
        found = {(one.name, one.at): one for one in self.figures}
        head = [self.axis]
        for name in names:
            head += [name, f"{name}, planned"] if name in planned else [name]
        rows = [head]
        for at in dict.fromkeys(one.at for one in self.figures):
            row = [AXES[self.axis](at or 0.0)]
            for name in names:
                one = found.get((name, at))
                row.append(one.shown(one.median) if one else "")
                if name in planned:
                    row.append(one.shown(one.planned) if one else "")
            rows.append(row)
        return rows

    def data(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "bench": self.kind, "title": self.title, "machine": self.machine, "settings": self.settings,
            "axis": self.axis, "figures": [one.data() for one in self.figures], "notes": list(self.notes),
        }  # fmt: skip
