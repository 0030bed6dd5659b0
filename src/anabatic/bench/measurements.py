"""What was measured: values of repeats, their median and range, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabatic.core.errors import Failure
from anabatic.core.formatting import format_size


def _format_seconds(value: float) -> str:
    scale, unit = next((row for row in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if value >= row[0]), (1e-6, "us"))
    return f"{value / scale:.3g} {unit}" if value < 100 else f"{value:,.0f} s"


def _format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


UNIT_FORMATTERS: dict[str, Callable[[float], str]] = {
    "tokens/s": _format_rate,
    "requests/s": _format_rate,
    "per second": _format_rate,
    "tokens": lambda value: f"{value:,.0f}",
    "s": _format_seconds,
    "B": format_size,
    "B/s": lambda value: f"{value / 1e9:.3g} GB/s" if value >= 1e9 else f"{value / 1e6:.3g} MB/s",
    "share": lambda value: f"{100 * value:.1f} %",
    "x": lambda value: f"{value:.2f}",
}
"""Unit of a figure -> how its values are written."""
SELF_DESCRIBING_UNITS = ("s", "B", "B/s", "share", "x")
"""Units that the values show themselves, or that are none."""
AXIS_FORMATTERS: dict[str, Callable[[float], str]] = {"bytes": format_size, "devices": lambda value: f"{value:.0f}"}
"""What figures of one name differ in -> how it is written."""


@dataclass(frozen=True)
class BenchMetric:
    """One quantity, measured several times.

    Attributes:
        unit: one of `UNIT_FORMATTERS`.
        values: of the repeats that count.
        planned_value: what the plan says; None: nothing.
        axis_value: place on the result's axis.
    """

    name: str
    unit: str
    values: tuple[float, ...]
    planned_value: float | None = None
    axis_value: float | None = None

    def __post_init__(self) -> None:
        if not self.values:
            raise Failure(f"{self.name} was not measured once", "run it again; look at the log")

    @property
    def median(self) -> float:
        """Middle of the values."""
        return statistics.median(self.values)

    def format_value(self, value: float | None) -> str:
        """Return a value in the figure's unit."""
        return "" if value is None else UNIT_FORMATTERS[self.unit](value)

    @property
    def value_range(self) -> str:
        """Least and most of the values; empty for one."""
        low, high = self.format_value(min(self.values)), self.format_value(max(self.values))
        return "" if len(self.values) == 1 else f"{low} - {high}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "name": self.name,
            "unit": self.unit,
            "at": self.axis_value,
            "median": self.median,
            "low": min(self.values),
            "high": max(self.values),
            "values": list(self.values),
            "planned": self.planned_value,
        }


@dataclass(frozen=True)
class BenchResult:
    """A measurement of one kind.

    Attributes:
        title: what was measured, in a line.
        settings: of the measurement; machine: where it was made.
        axis: what figures of one name differ in, one of `AXIS_FORMATTERS`; empty: each name comes once.
        notes: what a reader must know.
    """

    kind: str
    title: str
    metrics: Sequence[BenchMetric]
    settings: dict[str, Any]
    machine: dict[str, Any]
    axis: str = ""
    notes: Sequence[str] = field(default_factory=tuple)

    def build_table(self) -> list[list[str]]:
        """Return the table, its head first: a row a figure, or a row a place on the axis."""
        return self._table_by_axis() if self.axis else self._table_by_metric()

    def _table_by_metric(self) -> list[list[str]]:
        head = ["", "median", "range", "planned", "of it"]
        rows = [head]
        for one in self.metrics:
            ratio = f"{one.median / one.planned_value:.2f}" if one.planned_value else ""
            name = one.name if one.unit in SELF_DESCRIBING_UNITS else f"{one.name}, {one.unit}"
            rows.append(
                [name, one.format_value(one.median), one.value_range, one.format_value(one.planned_value), ratio]
            )
        used = [place for place in range(len(head)) if place == 0 or any(row[place] for row in rows[1:])]
        return [[row[place] for place in used] for row in rows]

    def _table_by_axis(self) -> list[list[str]]:
        names = list(dict.fromkeys(one.name for one in self.metrics))
        planned = {one.name for one in self.metrics if one.planned_value is not None}
        found = {(one.name, one.axis_value): one for one in self.metrics}
        head = [self.axis]
        for name in names:
            head += [name, f"{name}, planned"] if name in planned else [name]
        rows = [head]
        for at in dict.fromkeys(one.axis_value for one in self.metrics):
            row = [AXIS_FORMATTERS[self.axis](at or 0.0)]
            for name in names:
                one = found.get((name, at))
                row.append(one.format_value(one.median) if one else "")
                if name in planned:
                    row.append(one.format_value(one.planned_value) if one else "")
            rows.append(row)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "bench": self.kind,
            "title": self.title,
            "machine": self.machine,
            "settings": self.settings,
            "axis": self.axis,
            "figures": [one.to_dict() for one in self.metrics],
            "notes": list(self.notes),
        }
