"""Kinematic numbers of a segment: how it moves, how its transponder reports, where it points, where it is.

Groups can be chosen: `motion` alone generalises to regions never seen, `location` does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anabatic.trajectory.track import Floats, Track

Flags = NDArray[np.bool_]

COLUMNS = ("time", "lat", "lon", "sog", "cog", "heading")
METRES = 111_320.0
"""Metres of a degree of latitude."""
KNOTS = 3600 / 1852
"""Knots of a metre per second."""
MOVING = 1.0
"""Knots over which a point counts as moving."""
STILL = 0.5
"""Knots up to which a point counts as lying still."""
SPEED_BANDS = (0, 0.15, 1, 3, 5, 7, 9, 11, 13, 16, 20, 99)


def features(parts: Sequence[Track]) -> NDArray[np.float32]:
    """Return the numbers of `S` segments, `S x len(NAMES)`; NaN where a segment cannot tell."""
    return values(padded(parts))


def padded(parts: Sequence[Track]) -> Floats:
    """Return the points of `S` segments as `6 x S x P` (COLUMNS first), NaN behind the end of each."""
    longest = max((len(part) for part in parts), default=0)
    points = np.full((len(parts), longest, 6), np.nan)
    for place, part in enumerate(parts):
        points[place, : len(part)] = np.stack([getattr(part, name) for name in COLUMNS], axis=1)
    return np.ascontiguousarray(points.transpose(2, 0, 1))


def values(points: Floats) -> NDArray[np.float32]:
    """Return the numbers of padded points (`6 x S x P`), `S x len(NAMES)`.

    Segments are turned into metres on a plane that touches the globe at their middle.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = _Steps(points)
        found = {**_speed(steps), **_turns(steps), **_shape(steps), **_stops(steps), **_reports(steps)}
        found |= {**_bow(steps), **_location(steps)}
    numbers = np.stack([found[name] for name in NAMES], axis=1).astype(np.float32)
    numbers[~np.isfinite(numbers)] = np.nan
    return numbers


def _mean(numbers: Floats) -> Floats:
    known = np.isfinite(numbers)
    result: Floats = np.where(known, numbers, 0).sum(1) / known.sum(1)
    return result


def _deviation(numbers: Floats) -> Floats:
    return np.sqrt(np.maximum(_mean((numbers - _mean(numbers)[:, None]) ** 2), 0))


def _quantiles(numbers: Floats, shares: Sequence[float]) -> list[Floats]:
    """Quantiles of each row's numbers, interpolated, NaN left out; NaN for a row without numbers."""
    ordered = np.sort(numbers, axis=1)
    count = np.isfinite(numbers).sum(1)
    found = []
    for share in shares:
        at = share * np.maximum(count - 1, 0)
        low = np.floor(at).astype(np.intp)
        high = np.minimum(low + 1, np.maximum(count - 1, 0))
        rows = np.arange(len(numbers))
        value = ordered[rows, low] + (at - low) * (ordered[rows, high] - ordered[rows, low])
        found.append(np.where(count > 0, value, np.nan))
    return found


def _largest(numbers: Floats) -> Floats:
    found: Floats = np.fmax.reduce(numbers, axis=1, initial=-np.inf)
    return np.where(found > -np.inf, found, np.nan)


def _share(flags: Flags, among: Flags) -> Floats:
    """Share of `flags` among the places where `among` holds; NaN where there are none."""
    result: Floats = (flags & among).sum(1) / np.where(among.any(1), among.sum(1), np.nan)
    return result


def _where(flags: Flags, numbers: Floats) -> Floats:
    return np.where(flags, numbers, np.nan)


def _around(degrees: Floats) -> Floats:
    """The same direction, from -180 to 180 degrees."""
    return degrees - 360 * np.round(degrees / 360)


class _Steps:
    """Differences from point to point that several groups need; `S x P` for points, `S x (P - 1)` for steps."""

    def __init__(self, points: Floats) -> None:
        self.time, self.lat, self.lon, self.sog, self.cog, self.heading = points
        self.known = np.isfinite(self.time)
        self.count = self.known.sum(1)
        self.seconds = np.diff(self.time, axis=1)
        self.mean_lat, self.mean_lon = _mean(self.lat), self.lon[:, 0] + _mean(_around(self.lon - self.lon[:, :1]))
        self.x = _around(self.lon - self.mean_lon[:, None]) * METRES * np.cos(np.radians(self.mean_lat))[:, None]
        self.y = (self.lat - self.mean_lat[:, None]) * METRES
        self.dx, self.dy = np.diff(self.x, axis=1), np.diff(self.y, axis=1)
        self.metres = np.hypot(self.dx, self.dy)
        self.implied = self.metres / np.where(self.seconds > 0, self.seconds, np.nan) * KNOTS
        moving, still = self.sog > MOVING, self.sog <= STILL
        self.moving, self.still = moving, still
        self.both = moving[:, 1:] & moving[:, :-1]
        self.thrice = self.both[:, 1:] & self.both[:, :-1]
        self.rests = still[:, 1:] & still[:, :-1]
        self.faster = np.diff(self.sog, axis=1)
        self.turn = _around(np.diff(self.cog, axis=1))


def _speed(steps: _Steps) -> dict[str, Floats]:
    sog, both = steps.sog, steps.both
    low, quarter, half, three, high = _quantiles(sog, (0.05, 0.25, 0.5, 0.75, 0.95))
    found = {"sog_q5": low, "sog_q25": quarter, "sog_q50": half, "sog_q75": three, "sog_q95": high}
    found |= {"sog_mean": _mean(sog), "sog_std": _deviation(sog), "sog_max": _largest(sog)}
    for lower, upper in zip(SPEED_BANDS[:-1], SPEED_BANDS[1:], strict=True):
        found[f"sog_in_{lower:g}_{upper:g}"] = _share((sog >= lower) & (sog < upper), steps.known)
    under_way = _where(steps.moving, sog)
    found |= {
        "way_mean": _mean(under_way),
        "way_std": _deviation(under_way),
        "way_q50": _quantiles(under_way, [0.5])[0],
    }
    change = np.abs(_where(both, steps.faster))
    found["change_mean"] = _mean(change)
    found["change_q50"], found["change_q90"], found["change_max"] = _quantiles(change, (0.5, 0.9, 1.0))
    found["change_rel"] = found["change_mean"] / found["way_mean"]
    found["accel_q50"], found["accel_q90"] = _quantiles(change / (steps.seconds / 60), (0.5, 0.9))
    found["change_none"] = _share(np.abs(steps.faster) < 0.05, both)
    found["change_flips"] = _share(steps.faster[:, 1:] * steps.faster[:, :-1] < 0, steps.thrice)
    second = np.abs(sog[:, 2:] - 2 * sog[:, 1:-1] + sog[:, :-2])
    found["second_q50"] = _quantiles(_where(steps.thrice, second), [0.5])[0]
    implied, reported = _where(both & (steps.implied < 60), steps.implied), np.minimum(sog[:, 1:], 60)
    found["implied_ratio"] = _quantiles(implied / np.maximum(reported, 0.5), [0.5])[0]
    error = np.abs(steps.implied - (sog[:, 1:] + sog[:, :-1]) / 2)
    found["implied_error"] = _quantiles(_where(both, error), [0.5])[0]
    return found


def _turns(steps: _Steps) -> dict[str, Floats]:
    turn = _where(steps.both, steps.turn)
    size = np.abs(turn)
    total = np.where(np.isfinite(size), size, 0).sum(1)
    found = {"turn_mean": _mean(size)}
    names = ("turn_q25", "turn_q50", "turn_q75", "turn_q90", "turn_max")
    found |= dict(zip(names, _quantiles(size, (0.25, 0.5, 0.75, 0.9, 1.0)), strict=True))
    found["turn_signed"] = np.abs(np.where(np.isfinite(turn), turn, 0).sum(1)) / np.maximum(total, 1e-6)
    for degrees in (5, 15, 45, 90):
        found[f"turn_over_{degrees}"] = _share(size > degrees, np.isfinite(size))
    found["rate_q50"], found["rate_q90"] = _quantiles(size / (steps.seconds / 60), (0.5, 0.9))
    product = turn[:, 1:] * turn[:, :-1]
    found["turn_flips"] = _share(product < 0, np.isfinite(product))
    found["turn_change"] = _mean(size * np.abs(_where(steps.both, steps.faster)))
    bearing = np.degrees(np.arctan2(steps.dx, steps.dy)) % 360
    drift = np.abs(_around(bearing - steps.cog[:, :-1]))
    found["drift_q50"] = _quantiles(_where(steps.both, drift), [0.5])[0]
    found["cog_missing"] = _share(np.isnan(steps.cog) & np.isfinite(steps.sog), steps.known)
    return found


def _shape(steps: _Steps) -> dict[str, Floats]:
    x, y = steps.x, steps.y
    path = np.where(np.isfinite(steps.metres), steps.metres, 0).sum(1)
    box = np.hypot(_largest(x) + _largest(-x), _largest(y) + _largest(-y))
    hours = np.maximum(_largest(steps.time) + _largest(-steps.time), 60) / 3600
    last, rows = np.maximum(steps.count - 1, 0), np.arange(len(x))
    end = np.hypot(x[rows, last] - x[:, 0], y[rows, last] - y[:, 0])
    far = _largest(np.hypot(x - x[:, :1], y - y[:, :1]))
    xx, yy, xy = _mean(x * x), _mean(y * y), _mean(x * y)
    root = np.sqrt((xx - yy) ** 2 + 4 * xy**2)
    return {
        "straight": end / np.maximum(path, 1),
        "box_path": box / np.maximum(path, 1),
        "box": np.log1p(box),
        "box_rate": np.log1p(box / hours),
        "gyration": np.log1p(np.sqrt(xx + yy)),
        "returns": end / np.maximum(far, 1),
        "elongated": np.sqrt(np.maximum(xx + yy - root, 0) / np.maximum(xx + yy + root, 1e-9)),
    }


def _stops(steps: _Steps) -> dict[str, Floats]:
    still, known = steps.still, steps.known
    half, most = _quantiles(_where(steps.rests, steps.metres), (0.5, 0.9))
    x, y = _where(still, steps.x), _where(still, steps.y)
    middle = [_quantiles(one, [0.5])[0][:, None] for one in (x, y)]
    spread = _quantiles((x - middle[0]) ** 2 + (y - middle[1]) ** 2, [0.5])[0]
    angle = _where(still, np.radians(steps.cog))
    there = np.isfinite(steps.sog)
    changes = (still[:, 1:] != still[:, :-1]) & there[:, 1:]
    return {
        "stop_share": _share(still, known),
        "stop_step_q50": np.log1p(half),
        "stop_step_q90": np.log1p(most),
        "stop_spread": np.log1p(np.sqrt(spread)),
        "stop_zero": _share(steps.sog == 0, still),
        "stop_sog": _mean(_where(still, steps.sog)),
        "stop_cog": np.hypot(_mean(np.cos(angle)), _mean(np.sin(angle))),
        "stop_changes": changes.sum(1) / np.maximum(steps.count, 1),
        "stop_cog_same": _share(np.abs(steps.turn) < 0.05, steps.rests),
    }


def _reports(steps: _Steps) -> dict[str, Floats]:
    low, half, high = _quantiles(steps.seconds, (0.1, 0.5, 0.9))
    return {
        "heading_known": _share(np.isfinite(steps.heading), steps.known),
        "step_q10": low,
        "step_q50": half,
        "step_q90": high,
        "step_std": _deviation(steps.seconds),
        "step_max": _largest(steps.seconds),
    }


def _bow(steps: _Steps) -> dict[str, Floats]:
    off = _where(steps.sog > 2, _around(steps.heading - steps.cog))
    half, most = _quantiles(np.abs(off), (0.5, 0.9))
    swing = np.abs(_around(np.diff(steps.heading, axis=1)))
    swing_half, swing_most = _quantiles(swing, (0.5, 0.9))
    found = {"bow_off_q50": half, "bow_off_q90": most, "bow_off_mean": _mean(off)}
    return found | {"bow_q50": swing_half, "bow_q90": swing_most, "bow_stop": _mean(_where(steps.rests, swing))}


def _location(steps: _Steps) -> dict[str, Floats]:
    angle = np.where(np.isfinite(steps.time), steps.time % 86400, np.nan) / 86400 * 2 * np.pi
    hour = _mean(angle)
    return {"lat": steps.mean_lat, "lon": steps.mean_lon, "hour_sin": np.sin(hour), "hour_cos": np.cos(hour)}


def _groups() -> dict[str, str]:
    """Names in the order they are made, from one segment of two points."""
    steps = _Steps(np.zeros((6, 1, 3)))
    made = {
        "motion": (_speed, _turns, _shape, _stops),
        "transponder": (_reports,),
        "heading": (_bow,),
        "location": (_location,),
    }
    with np.errstate(invalid="ignore", divide="ignore"):
        return {name: group for group, parts in made.items() for part in parts for name in part(steps)}


GROUPS: dict[str, str] = _groups()
"""Name of each number -> `motion`, `transponder`, `heading` or `location` (where and when: remembers fleets)."""
NAMES: tuple[str, ...] = tuple(GROUPS)
"""Order of the numbers in a row."""
