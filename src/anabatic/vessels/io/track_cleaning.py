"""One vessel's points: what no ship does is taken out and counted, and two hulls under one id are distinguished."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from anabatic.vessels.io.point_conversion import PointArray
from anabatic.vessels.io.track import measure_steps

METRES_PER_SECOND_PER_KNOT = 1852 / 3600
"""Metres per second."""
SLACK_METRES = 500.0
"""Metres that a position may be off (interpolated or mistimed reports) before a step counts as a jump."""
MIN_HULL_POINTS = 10
"""Points that make a hull of its own; fewer are jumps."""
MAX_HULLS = 8
SHIP_ID_RANGE = (200_000_000, 775_999_999)
"""Ids of ships: maritime identification digits 201 to 775 in front (ITU-R M.585)."""

IndexArray = NDArray[np.intp]


def is_ship_id(vessel: str) -> bool:
    """True for an id that a ship can have."""
    return (
        len(vessel) < 20
        and vessel.isascii()
        and vessel.isdigit()
        and SHIP_ID_RANGE[0] <= int(vessel) <= SHIP_ID_RANGE[1]
    )


def split_into_hulls(points: PointArray, max_knots: float, counts: Counter[str]) -> list[PointArray]:
    """Return the parts of one vessel's points that one hull can have sailed.

    A piece ends where the next position cannot be reached; where reports from two places alternate, each place
    becomes a piece.

    Args:
        points: of one vessel, by time.
        max_knots: what a hull can do.
        counts: `duplicate points`, `jumps`, `tracks broken at a jump`, `vessels with two hulls under one id`.
    """
    same = np.flatnonzero(np.diff(points["time"]) == 0) + 1
    if len(same):
        counts["duplicate points (same vessel, same second)"] += len(same)
        points = np.delete(points, same)
    if len(points) < 2:
        return [points]
    steps = measure_steps(points["lat"], points["lon"])
    if not (steps > np.diff(points["time"]) * max_knots * METRES_PER_SECOND_PER_KNOT + SLACK_METRES).any():
        return [points]
    hulls = _assign_hulls(points, max_knots * METRES_PER_SECOND_PER_KNOT)
    kept = [hull for hull in hulls if len(hull) >= min(MIN_HULL_POINTS, len(points) // 2)]
    counts["jumps (points out of reach)"] += len(points) - sum(map(len, kept))
    spans = sorted((int(hull[0]), int(hull[-1])) for hull in kept)
    crossing = any(later[0] < earlier[1] for earlier, later in zip(spans, spans[1:], strict=False))
    if len(kept) > 1:
        counts["vessels with two hulls under one id" if crossing else "tracks broken at a jump"] += 1
    return [points[hull] for hull in kept]


def _assign_hulls(points: PointArray, speed: float) -> list[IndexArray]:
    """Give each point to the nearest hull that can have reached it, else to a new one."""
    lat, lon = np.radians(points["lat"]), np.radians(points["lon"])
    places = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)
    times = points["time"].tolist()
    hulls: list[list[int]] = []
    for index, (place, time) in enumerate(zip(places, times, strict=True)):
        best, best_distance = -1, np.inf
        for number, hull in enumerate(hulls):
            chord = float(np.linalg.norm(place - places[hull[-1]])) * 6_371_008.8
            if chord <= (time - times[hull[-1]]) * speed + SLACK_METRES and chord < best_distance:
                best, best_distance = number, chord
        if best >= 0:
            hulls[best].append(index)
        else:
            if len(hulls) == MAX_HULLS:
                hulls.remove(min(hulls, key=lambda hull: (len(hull), hull[-1])))
            hulls.append([index])
    return [np.array(hull) for hull in sorted(hulls)]
