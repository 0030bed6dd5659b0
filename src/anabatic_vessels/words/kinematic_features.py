"""Kinematic features of a segment: motion, reporting of the transponder, heading, location.

Groups can be selected: `motion` alone generalises to new regions, `location` does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anabatic_vessels.io.track import Floats, Track

BoolArray = NDArray[np.bool_]

TRACK_COLUMNS = ("time", "lat", "lon", "sog", "cog", "heading")
METRES_PER_DEGREE = 111_320.0
"""Metres per degree of latitude."""
KNOTS_PER_METRE_PER_SECOND = 3600 / 1852
"""Knots per metre per second."""
MOVING_KNOTS = 1.0
"""Speed in knots above which a point counts as moving."""
STILL_KNOTS = 0.5
"""Speed in knots up to which a point counts as stationary."""
SPEED_BANDS = (0, 0.15, 1, 3, 5, 7, 9, 11, 13, 16, 20, 99)


def compute_features(tracks: Sequence[Track]) -> NDArray[np.float32]:
    """Return the features of `S` segments, `S x len(FEATURE_NAMES)`; NaN: undefined."""
    return compute_padded_features(pad_tracks(tracks))


def pad_tracks(tracks: Sequence[Track]) -> Floats:
    """Return the points of `S` segments as `6 x S x P` (TRACK_COLUMNS first), padded with NaN."""
    longest = max((len(track) for track in tracks), default=0)
    points = np.full((len(tracks), longest, 6), np.nan)
    for index, track in enumerate(tracks):
        points[index, : len(track)] = np.stack([getattr(track, name) for name in TRACK_COLUMNS], axis=1)
    return np.ascontiguousarray(points.transpose(2, 0, 1))


def compute_padded_features(points: Floats) -> NDArray[np.float32]:
    """Return the features of padded points (`6 x S x P`), `S x len(FEATURE_NAMES)`.

    Positions are projected to metres on a plane tangent to the globe at the mean of the segment.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = _StepDifferences(points)
        features = {
            **_speed_features(steps),
            **_turn_features(steps),
            **_shape_features(steps),
            **_stop_features(steps),
            **_report_features(steps),
        }
        features |= {**_heading_features(steps), **_location_features(steps)}
    result = np.stack([features[name] for name in FEATURE_NAMES], axis=1).astype(np.float32)
    result[~np.isfinite(result)] = np.nan
    return result


def _row_mean(values: Floats) -> Floats:
    is_known = np.isfinite(values)
    result: Floats = np.where(is_known, values, 0).sum(1) / is_known.sum(1)
    return result


def _row_std(values: Floats) -> Floats:
    return np.sqrt(np.maximum(_row_mean((values - _row_mean(values)[:, None]) ** 2), 0))


def _row_quantiles(values: Floats, fractions: Sequence[float]) -> list[Floats]:
    """Return interpolated quantiles of each row without its NaN values; NaN for a row of NaN."""
    ordered = np.sort(values, axis=1)
    count = np.isfinite(values).sum(1)
    quantiles = []
    for fraction in fractions:
        position = fraction * np.maximum(count - 1, 0)
        low = np.floor(position).astype(np.intp)
        high = np.minimum(low + 1, np.maximum(count - 1, 0))
        rows = np.arange(len(values))
        value = ordered[rows, low] + (position - low) * (ordered[rows, high] - ordered[rows, low])
        quantiles.append(np.where(count > 0, value, np.nan))
    return quantiles


def _row_max(values: Floats) -> Floats:
    maxima: Floats = np.fmax.reduce(values, axis=1, initial=-np.inf)
    return np.where(maxima > -np.inf, maxima, np.nan)


def _fraction_of(flags: BoolArray, mask: BoolArray) -> Floats:
    """Return the fraction of `flags` where `mask` is true; NaN if it never is."""
    result: Floats = (flags & mask).sum(1) / np.where(mask.any(1), mask.sum(1), np.nan)
    return result


def _mask_values(flags: BoolArray, values: Floats) -> Floats:
    return np.where(flags, values, np.nan)


def _wrap_degrees(degrees: Floats) -> Floats:
    """Return the same direction from -180 to 180 degrees."""
    return degrees - 360 * np.round(degrees / 360)


class _StepDifferences:
    """Differences between points, shared by the groups; `S x P` for points, `S x (P - 1)` for steps."""

    def __init__(self, points: Floats) -> None:
        self.time, self.lat, self.lon, self.sog, self.cog, self.heading = points
        self.known = np.isfinite(self.time)
        self.count = self.known.sum(1)
        self.seconds = np.diff(self.time, axis=1)
        self.mean_lat, self.mean_lon = (
            _row_mean(self.lat),
            self.lon[:, 0] + _row_mean(_wrap_degrees(self.lon - self.lon[:, :1])),
        )
        self.x = (
            _wrap_degrees(self.lon - self.mean_lon[:, None])
            * METRES_PER_DEGREE
            * np.cos(np.radians(self.mean_lat))[:, None]
        )
        self.y = (self.lat - self.mean_lat[:, None]) * METRES_PER_DEGREE
        self.dx, self.dy = np.diff(self.x, axis=1), np.diff(self.y, axis=1)
        self.step_metres = np.hypot(self.dx, self.dy)
        self.implied_knots = (
            self.step_metres / np.where(self.seconds > 0, self.seconds, np.nan) * KNOTS_PER_METRE_PER_SECOND
        )
        moving, still = self.sog > MOVING_KNOTS, self.sog <= STILL_KNOTS
        self.moving, self.still = moving, still
        self.both_moving = moving[:, 1:] & moving[:, :-1]
        self.three_moving = self.both_moving[:, 1:] & self.both_moving[:, :-1]
        self.both_still = still[:, 1:] & still[:, :-1]
        self.speed_change = np.diff(self.sog, axis=1)
        self.course_change = _wrap_degrees(np.diff(self.cog, axis=1))


def _speed_features(steps: _StepDifferences) -> dict[str, Floats]:
    sog, both_moving = steps.sog, steps.both_moving
    low, lower_quartile, median, upper_quartile, high = _row_quantiles(sog, (0.05, 0.25, 0.5, 0.75, 0.95))
    features = {"sog_q5": low, "sog_q25": lower_quartile, "sog_q50": median, "sog_q75": upper_quartile, "sog_q95": high}
    features |= {"sog_mean": _row_mean(sog), "sog_std": _row_std(sog), "sog_max": _row_max(sog)}
    for lower, upper in zip(SPEED_BANDS[:-1], SPEED_BANDS[1:], strict=True):
        features[f"sog_in_{lower:g}_{upper:g}"] = _fraction_of((sog >= lower) & (sog < upper), steps.known)
    under_way = _mask_values(steps.moving, sog)
    features |= {
        "way_mean": _row_mean(under_way),
        "way_std": _row_std(under_way),
        "way_q50": _row_quantiles(under_way, [0.5])[0],
    }
    change = np.abs(_mask_values(both_moving, steps.speed_change))
    features["change_mean"] = _row_mean(change)
    features["change_q50"], features["change_q90"], features["change_max"] = _row_quantiles(change, (0.5, 0.9, 1.0))
    features["change_rel"] = features["change_mean"] / features["way_mean"]
    features["accel_q50"], features["accel_q90"] = _row_quantiles(change / (steps.seconds / 60), (0.5, 0.9))
    features["change_none"] = _fraction_of(np.abs(steps.speed_change) < 0.05, both_moving)
    features["change_flips"] = _fraction_of(
        steps.speed_change[:, 1:] * steps.speed_change[:, :-1] < 0, steps.three_moving
    )
    second = np.abs(sog[:, 2:] - 2 * sog[:, 1:-1] + sog[:, :-2])
    features["second_q50"] = _row_quantiles(_mask_values(steps.three_moving, second), [0.5])[0]
    implied, reported = (
        _mask_values(both_moving & (steps.implied_knots < 60), steps.implied_knots),
        np.minimum(sog[:, 1:], 60),
    )
    features["implied_ratio"] = _row_quantiles(implied / np.maximum(reported, 0.5), [0.5])[0]
    error = np.abs(steps.implied_knots - (sog[:, 1:] + sog[:, :-1]) / 2)
    features["implied_error"] = _row_quantiles(_mask_values(both_moving, error), [0.5])[0]
    return features


def _turn_features(steps: _StepDifferences) -> dict[str, Floats]:
    turn = _mask_values(steps.both_moving, steps.course_change)
    magnitude = np.abs(turn)
    total = np.where(np.isfinite(magnitude), magnitude, 0).sum(1)
    features = {"turn_mean": _row_mean(magnitude)}
    names = ("turn_q25", "turn_q50", "turn_q75", "turn_q90", "turn_max")
    features |= dict(zip(names, _row_quantiles(magnitude, (0.25, 0.5, 0.75, 0.9, 1.0)), strict=True))
    features["turn_signed"] = np.abs(np.where(np.isfinite(turn), turn, 0).sum(1)) / np.maximum(total, 1e-6)
    for degrees in (5, 15, 45, 90):
        features[f"turn_over_{degrees}"] = _fraction_of(magnitude > degrees, np.isfinite(magnitude))
    features["rate_q50"], features["rate_q90"] = _row_quantiles(magnitude / (steps.seconds / 60), (0.5, 0.9))
    product = turn[:, 1:] * turn[:, :-1]
    features["turn_flips"] = _fraction_of(product < 0, np.isfinite(product))
    features["turn_change"] = _row_mean(magnitude * np.abs(_mask_values(steps.both_moving, steps.speed_change)))
    bearing = np.degrees(np.arctan2(steps.dx, steps.dy)) % 360
    drift = np.abs(_wrap_degrees(bearing - steps.cog[:, :-1]))
    features["drift_q50"] = _row_quantiles(_mask_values(steps.both_moving, drift), [0.5])[0]
    features["cog_missing"] = _fraction_of(np.isnan(steps.cog) & np.isfinite(steps.sog), steps.known)
    return features


def _shape_features(steps: _StepDifferences) -> dict[str, Floats]:
    x, y = steps.x, steps.y
    path = np.where(np.isfinite(steps.step_metres), steps.step_metres, 0).sum(1)
    box = np.hypot(_row_max(x) + _row_max(-x), _row_max(y) + _row_max(-y))
    hours = np.maximum(_row_max(steps.time) + _row_max(-steps.time), 60) / 3600
    last, rows = np.maximum(steps.count - 1, 0), np.arange(len(x))
    end_distance = np.hypot(x[rows, last] - x[:, 0], y[rows, last] - y[:, 0])
    max_distance = _row_max(np.hypot(x - x[:, :1], y - y[:, :1]))
    xx, yy, xy = _row_mean(x * x), _row_mean(y * y), _row_mean(x * y)
    root = np.sqrt((xx - yy) ** 2 + 4 * xy**2)
    return {
        "straight": end_distance / np.maximum(path, 1),
        "box_path": box / np.maximum(path, 1),
        "box": np.log1p(box),
        "box_rate": np.log1p(box / hours),
        "gyration": np.log1p(np.sqrt(xx + yy)),
        "returns": end_distance / np.maximum(max_distance, 1),
        "elongated": np.sqrt(np.maximum(xx + yy - root, 0) / np.maximum(xx + yy + root, 1e-9)),
    }


def _stop_features(steps: _StepDifferences) -> dict[str, Floats]:
    still, known = steps.still, steps.known
    median, upper = _row_quantiles(_mask_values(steps.both_still, steps.step_metres), (0.5, 0.9))
    x, y = _mask_values(still, steps.x), _mask_values(still, steps.y)
    center = [_row_quantiles(values, [0.5])[0][:, None] for values in (x, y)]
    spread = _row_quantiles((x - center[0]) ** 2 + (y - center[1]) ** 2, [0.5])[0]
    angle = _mask_values(still, np.radians(steps.cog))
    has_speed = np.isfinite(steps.sog)
    changes = (still[:, 1:] != still[:, :-1]) & has_speed[:, 1:]
    return {
        "stop_share": _fraction_of(still, known),
        "stop_step_q50": np.log1p(median),
        "stop_step_q90": np.log1p(upper),
        "stop_spread": np.log1p(np.sqrt(spread)),
        "stop_zero": _fraction_of(steps.sog == 0, still),
        "stop_sog": _row_mean(_mask_values(still, steps.sog)),
        "stop_cog": np.hypot(_row_mean(np.cos(angle)), _row_mean(np.sin(angle))),
        "stop_changes": changes.sum(1) / np.maximum(steps.count, 1),
        "stop_cog_same": _fraction_of(np.abs(steps.course_change) < 0.05, steps.both_still),
    }


def _report_features(steps: _StepDifferences) -> dict[str, Floats]:
    low, median, high = _row_quantiles(steps.seconds, (0.1, 0.5, 0.9))
    return {
        "heading_known": _fraction_of(np.isfinite(steps.heading), steps.known),
        "step_q10": low,
        "step_q50": median,
        "step_q90": high,
        "step_std": _row_std(steps.seconds),
        "step_max": _row_max(steps.seconds),
    }


def _heading_features(steps: _StepDifferences) -> dict[str, Floats]:
    offset = _mask_values(steps.sog > 2, _wrap_degrees(steps.heading - steps.cog))
    median, upper = _row_quantiles(np.abs(offset), (0.5, 0.9))
    swing = np.abs(_wrap_degrees(np.diff(steps.heading, axis=1)))
    swing_median, swing_upper = _row_quantiles(swing, (0.5, 0.9))
    features = {"bow_off_q50": median, "bow_off_q90": upper, "bow_off_mean": _row_mean(offset)}
    return features | {
        "bow_q50": swing_median,
        "bow_q90": swing_upper,
        "bow_stop": _row_mean(_mask_values(steps.both_still, swing)),
    }


def _location_features(steps: _StepDifferences) -> dict[str, Floats]:
    angle = np.where(np.isfinite(steps.time), steps.time % 86400, np.nan) / 86400 * 2 * np.pi
    hour = _row_mean(angle)
    return {"lat": steps.mean_lat, "lon": steps.mean_lon, "hour_sin": np.sin(hour), "hour_cos": np.cos(hour)}


def _build_groups() -> dict[str, str]:
    """Return name -> group in the order of computation, from a dummy segment."""
    steps = _StepDifferences(np.zeros((6, 1, 3)))
    functions_by_group = {
        "motion": (_speed_features, _turn_features, _shape_features, _stop_features),
        "transponder": (_report_features,),
        "heading": (_heading_features,),
        "location": (_location_features,),
    }
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            name: group
            for group, functions in functions_by_group.items()
            for function in functions
            for name in function(steps)
        }


FEATURE_GROUPS: dict[str, str] = _build_groups()
"""Feature name -> `motion`, `transponder`, `heading` or `location` (position and hour: memorizes fleets)."""
FEATURE_NAMES: tuple[str, ...] = tuple(FEATURE_GROUPS)
"""Order of the features in a row."""
