"""Clean the points of one vessel: remove and count impossible points, and separate two hulls under one id."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from anabatic.vessels.io.point_conversion import PointArray
from anabatic.vessels.io.track import measure_steps

METRES_PER_SECOND_PER_KNOT = 1852 / 3600
"""Metres per second of one knot."""
SLACK_METRES = 500.0
"""Tolerance in metres for position errors (interpolated or mistimed reports) before a step counts as a jump."""
MIN_HULL_POINTS = 10
"""Minimum points of a separate hull; fewer are jumps."""
MAX_HULLS = 8
SHIP_ID_RANGE = (200_000_000, 775_999_999)
"""Ids of ships: they start with maritime identification digits 201 to 775 (ITU-R M.585)."""

IndexArray = NDArray[np.intp]


def is_ship_id(vessel: str) -> bool:
    """Return whether an id is a valid ship MMSI."""
    return (
        len(vessel) < 20
        and vessel.isascii()
        and vessel.isdigit()
        and SHIP_ID_RANGE[0] <= int(vessel) <= SHIP_ID_RANGE[1]
    )


def split_into_hulls(points: PointArray, max_knots: float, counts: Counter[str]) -> list[PointArray]:
    """Split the points of one vessel into parts that a single hull can have sailed.

    A part ends where the next position is out of reach; if reports from two positions alternate, each becomes a part.

    Args:
        points: points of one vessel, sorted by time.
        max_knots: maximum speed of a hull.
        counts: `duplicate points`, `jumps`, `tracks broken at a jump`, `vessels with two hulls under one id`.
    """
    duplicates = np.flatnonzero(np.diff(points["time"]) == 0) + 1
    if len(duplicates):
        counts["duplicate points (same vessel, same second)"] += len(duplicates)
        points = np.delete(points, duplicates)
    if len(points) < 2:
        return [points]
    steps = measure_steps(points["lat"], points["lon"])
    if not (steps > np.diff(points["time"]) * max_knots * METRES_PER_SECOND_PER_KNOT + SLACK_METRES).any():
        return [points]
    hulls = _assign_hulls(points, max_knots * METRES_PER_SECOND_PER_KNOT)
    kept = [hull for hull in hulls if len(hull) >= min(MIN_HULL_POINTS, len(points) // 2)]
    counts["jumps (points out of reach)"] += len(points) - sum(map(len, kept))
    spans = sorted((int(hull[0]), int(hull[-1])) for hull in kept)
    has_overlap = any(later[0] < earlier[1] for earlier, later in zip(spans, spans[1:], strict=False))
    if len(kept) > 1:
        counts["vessels with two hulls under one id" if has_overlap else "tracks broken at a jump"] += 1
    return [points[hull] for hull in kept]


def _assign_hulls(points: PointArray, speed: float) -> list[IndexArray]:
    """Assign each point to the nearest hull that can have reached it, else to a new one."""
    lat, lon = np.radians(points["lat"]), np.radians(points["lon"])
    positions = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)
    times = points["time"].tolist()
    hulls: list[list[int]] = []
    for index, (position, time) in enumerate(zip(positions, times, strict=True)):
        nearest, nearest_distance = -1, np.inf
        for hull_index, hull in enumerate(hulls):
            chord = float(np.linalg.norm(position - positions[hull[-1]])) * 6_371_008.8
            if chord <= (time - times[hull[-1]]) * speed + SLACK_METRES and chord < nearest_distance:
                nearest, nearest_distance = hull_index, chord
        if nearest >= 0:
            hulls[nearest].append(index)
        else:
            if len(hulls) == MAX_HULLS:
                hulls.remove(min(hulls, key=lambda hull: (len(hull), hull[-1])))
            hulls.append([index])
    return [np.array(hull) for hull in sorted(hulls)]
