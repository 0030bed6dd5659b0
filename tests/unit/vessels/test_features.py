"""Kinematic numbers of segments, against their definition written out point by point."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anabatic_vessels.io.track import Track
from anabatic_vessels.words.kinematic_features import FEATURE_GROUPS, FEATURE_NAMES, compute_features


def sailed(count: int, seed: int = 0) -> Track:
    """A vessel that lies still, sails, turns and stops, with values that are missing here and there."""
    rng = np.random.default_rng(seed)
    time = 1_577_836_800 + np.cumsum(rng.integers(5, 300, count))
    sog = np.round(np.abs(np.cumsum(rng.normal(0, 2, count))) * (rng.random(count) > 0.2), 1)
    cog = np.round(np.cumsum(rng.normal(0, 30, count)) % 360, 1)
    lat, lon = 50 + np.cumsum(rng.normal(0, 0.003, count)), 1 + np.cumsum(rng.normal(0, 0.003, count))
    heading = (cog + rng.normal(0, 5, count)) % 360
    sog[rng.random(count) < 0.1] = np.nan
    heading[rng.random(count) < 0.3] = np.nan
    return Track("1", "a", time, lat, lon, sog, cog, heading)


def quantile(values: list[float], share: float) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return float(np.quantile(known, share)) if known else math.nan


def mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def slowly(track: Track) -> dict[str, float]:
    """Some of the numbers of every group, by loops over the points."""
    pairs = [(here, here + 1) for here in range(len(track) - 1)]
    moving = [(a, b) for a, b in pairs if track.sog[a] > 1 and track.sog[b] > 1]
    turns = [abs((track.cog[b] - track.cog[a] + 180) % 360 - 180) for a, b in moving]
    changes = [abs(track.sog[b] - track.sog[a]) for a, b in moving]
    still = [index for index in range(len(track)) if track.sog[index] <= 0.5]
    lat, lon = mean(list(track.lat)), mean(list(track.lon))
    x = (track.lon - lon) * 111_320 * math.cos(math.radians(lat))
    y = (track.lat - lat) * 111_320
    path = sum(math.hypot(x[b] - x[a], y[b] - y[a]) for a, b in pairs)
    off = [abs((h - c + 180) % 360 - 180) for s, c, h in zip(track.sog, track.cog, track.heading, strict=True) if s > 2]
    return {
        "sog_q25": quantile(list(track.sog), 0.25),
        "sog_mean": mean(list(track.sog)),
        "sog_in_1_3": sum(1 <= value < 3 for value in track.sog) / len(track),
        "change_q90": quantile(changes, 0.9),
        "turn_mean": mean(turns),
        "turn_over_15": sum(turn > 15 for turn in turns) / len(turns) if turns else math.nan,
        "rate_q50": quantile(
            [t / ((track.time[b] - track.time[a]) / 60) for t, (a, b) in zip(turns, moving, strict=True)], 0.5
        ),
        "straight": math.hypot(x[-1] - x[0], y[-1] - y[0]) / path,
        "box": math.log1p(math.hypot(max(x) - min(x), max(y) - min(y))),
        "stop_share": len(still) / len(track),
        "stop_zero": sum(track.sog[index] == 0 for index in still) / len(still) if still else math.nan,
        "heading_known": sum(not math.isnan(value) for value in track.heading) / len(track),
        "step_q50": quantile([float(track.time[b] - track.time[a]) for a, b in pairs], 0.5),
        "step_max": float(max(track.time[b] - track.time[a] for a, b in pairs)),
        "bow_off_q50": quantile(off, 0.5),
        "lat": lat,
        "lon": lon,
    }


def test_numbers_are_those_of_the_definition() -> None:
    tracks = [sailed(count, seed) for seed, count in enumerate((30, 10, 17, 2, 29))]
    found = compute_features(tracks)
    assert found.shape == (5, len(FEATURE_NAMES))
    for row, track in zip(found, tracks, strict=True):
        for name, expected in slowly(track).items():
            value = float(row[FEATURE_NAMES.index(name)])
            assert value == pytest.approx(expected, rel=2e-5, abs=1e-5, nan_ok=True), name


def test_a_segment_s_numbers_do_not_depend_on_the_others() -> None:
    tracks = [sailed(count, seed) for seed, count in enumerate((30, 10, 17))]
    alone = np.concatenate([compute_features([track]) for track in tracks])
    np.testing.assert_allclose(compute_features(tracks), alone, rtol=1e-6, atol=1e-6)


def test_movement_does_not_tell_where_or_when() -> None:
    track = sailed(30)
    moved = Track("1", "a", track.time + 7 * 3600, track.lat, track.lon + 60, track.sog, track.cog, track.heading)
    here, there = compute_features([track])[0], compute_features([moved])[0]
    for name, one, other in zip(FEATURE_NAMES, here, there, strict=True):
        same = math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3) or (math.isnan(one) and math.isnan(other))
        assert same or FEATURE_GROUPS[name] == "location", name


def test_segments_across_the_date_line_are_not_wide() -> None:
    track = sailed(30)
    place = list(FEATURE_GROUPS).index("box")
    shifted = Track("1", "a", track.time, track.lat, (track.lon + 178.99 + 180) % 360 - 180, *[track.sog] * 3)
    assert (np.abs(np.diff(shifted.lon)) > 300).any()
    plain = Track("1", "a", track.time, track.lat, track.lon, *[track.sog] * 3)
    assert compute_features([shifted])[0][place] == pytest.approx(compute_features([plain])[0][place], rel=1e-4)


def test_groups() -> None:
    assert set(FEATURE_GROUPS.values()) == {"motion", "transponder", "heading", "location"}
    assert [name for name, group in FEATURE_GROUPS.items() if group == "location"] == [
        "lat",
        "lon",
        "hour_sin",
        "hour_cos",
    ]
