"""Numbers of a vessel's day, against loops over the segments."""

from __future__ import annotations

import math

import numpy as np

from anabatic_vessels.model.baselines import DAY_SECONDS, aggregate_by_day, number_days


def test_a_vessel_s_day_is_one_row() -> None:
    draw = np.random.default_rng(0)
    numbers = draw.normal(50, 9, (60, 5)).astype(np.float32)
    numbers[draw.random(numbers.shape) < 0.6] = np.nan
    numbers[:, 4] = np.nan
    vessels = [f"v{number}" for number in draw.integers(0, 6, 60)]
    starts: list[int | None] = (1_577_836_800 + draw.integers(0, 72, 60) * 3600).tolist()
    starts[3] = None
    groups = number_days(vessels, starts)
    first = {ship: min(t for t, own in zip(starts, vessels, strict=True) if own == ship and t) for ship in vessels}
    names = [(ship, ((t or first[ship]) - first[ship]) // DAY_SECONDS) for ship, t in zip(vessels, starts, strict=True)]
    assert len(set(zip(groups.tolist(), names, strict=True))) == len(set(names)) == groups.max() + 1
    found = aggregate_by_day(numbers, groups)
    assert found.shape == (groups.max() + 1, 15)
    for group in range(groups.max() + 1):
        for column in range(5):
            same = [float(numbers[other, column]) for other in range(60) if groups[other] == group]
            known = [one for one in same if not math.isnan(one)] or [math.nan]
            expected = [sum(known) / len(known), min(known), max(known)]
            np.testing.assert_allclose(found[group, [column, 5 + column, 10 + column]], expected, rtol=1e-6)


def test_segments_without_a_time_are_one_row_and_none_is_none() -> None:
    assert number_days(["a", "b", "a"], [None, None, None]).tolist() == [0, 1, 0]
    assert number_days([], []).shape == (0,) and aggregate_by_day(
        np.zeros((0, 3), np.float32), number_days([], [])
    ).shape == (0, 9)
