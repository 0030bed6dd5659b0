"""Points of one vessel, sorted by time, as columns; the policy for rows that cannot be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


_VALUE_COLUMNS = ("lat", "lon", "sog", "cog", "heading")


@dataclass(frozen=True)
class Track:
    """Columns of `n` points of one vessel.

    Attributes:
        vessel: group id: the MMSI, or the stem of the file if it contains one vessel.
        source_file: name of the file of its first point.
        time: `n` unix seconds (UTC), ascending.
        lat: `n` degrees north.
        lon: `n` degrees east.
        sog: `n` knots over ground; NaN: not available.
        cog: `n` degrees of course over ground, clockwise from north; NaN: not available.
        heading: `n` degrees the bow points to; NaN: not available.
        label: text of the class column; empty: none.
        line: line of its first point in `source_file`.
    """

    vessel: str
    source_file: str
    time: Ints
    lat: Floats
    lon: Floats
    sog: Floats
    cog: Floats
    heading: Floats
    label: str = ""
    line: int = 0

    def __len__(self) -> int:
        return len(self.time)

    def slice_points(self, start: int, end: int) -> Track:
        """Return points `start` to `end` (exclusive)."""
        lat, lon, sog, cog, heading = (getattr(self, name)[start:end] for name in _VALUE_COLUMNS)
        time = self.time[start:end]
        return Track(self.vessel, self.source_file, time, lat, lon, sog, cog, heading, self.label, self.line)


def measure_steps(lat: Floats, lon: Floats) -> Floats:
    """Return the great-circle steps of `n` points: `n - 1` metres (haversine, sphere of 6,371,008.8 m: IUGG mean
    radius)."""
    phi, lam = np.radians(lat), np.radians(lon)
    haversine = np.sin(np.diff(phi) / 2) ** 2 + np.cos(phi[:-1]) * np.cos(phi[1:]) * np.sin(np.diff(lam) / 2) ** 2
    steps: Floats = 2 * 6_371_008.8 * np.arcsin(np.sqrt(np.minimum(haversine, 1.0)))
    return steps


METRES_PER_SECOND_PER_KNOT = 1852 / 3600
"""Metres per second of one knot."""
SLACK_METRES = 500.0
"""Tolerance in metres for position errors (interpolated or mistimed reports) before a step counts as a jump."""


def measure_jumps(time: Ints, lat: Floats, lon: Floats, max_knots: float) -> NDArray[np.bool_]:
    """Return for each of `n - 1` steps whether it needs more than `max_knots`."""
    reach = np.diff(time) * max_knots * METRES_PER_SECOND_PER_KNOT + SLACK_METRES
    return np.asarray(measure_steps(lat, lon) > reach)


NO_POSITION = "messages without a position (their ship types are read)"
"""Reason for which messages are not points."""
UNREADABLE_ROWS = "rows that cannot be read"
SKIP_HINT = "or skip such rows with --tracks.on-bad-row skip"


@dataclass
class BadRowPolicy:
    """The policy, with counts of skipped and changed rows.

    Attributes:
        should_skip: count instead of stopping.
        counts: number of skipped or changed items, by reason.
        examples: messages of the first skipped rows.
    """

    should_skip: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def report_row(self, message: str, hint: str, kind: str = UNREADABLE_ROWS) -> None:
        """Report one bad row.

        Args:
            message: file, line and error.
            hint: how to fix it.
            kind: reason under which it is counted.

        Raises:
            DataError: rows are not skipped.
        """
        if not self.should_skip:
            raise DataError(message, f"{hint}, {SKIP_HINT}")
        self.counts[kind] += 1
        if len(self.examples) < 5:
            self.examples.append(message)
