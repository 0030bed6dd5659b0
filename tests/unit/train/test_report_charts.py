"""Curves: nothing is lost when points are left out, and everything drawn lies in the picture."""

from __future__ import annotations

import math
import random
import re

from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.svg_plot import compute_ticks
from anabatic.monitor.run_data import Points, downsample_points, smooth_points
from anabatic.train.report.charts import MAX_POINTS, Curve, draw_chart

values = st.none() | st.floats(-1e30, 1e30)
curves = st.lists(st.tuples(st.integers(0, 10**7), values), max_size=60, unique_by=lambda point: point[0]).map(sorted)


def text(value: float) -> str:
    return f"{value:.4g}"


def test_downsampling_keeps_spikes_holes_and_ends() -> None:
    draw = random.Random(1)
    points: Points = [(step, draw.gauss(2, 0.01)) for step in range(200_000)]
    points[77_777] = (77_777, 9.0)
    points[88_888] = (88_888, -9.0)
    points[99_999] = (99_999, None)
    kept = downsample_points(points, MAX_POINTS)
    assert MAX_POINTS / 2 < len(kept) <= MAX_POINTS * 1.1
    assert {points[77_777], points[88_888], points[99_999], points[0], points[-1]} <= set(kept)
    assert kept == sorted(kept, key=lambda point: point[0])


@given(curves, st.integers(8, 40))
def test_downsampling_takes_from_the_points(points: Points, most: int) -> None:
    kept = downsample_points(points, most)
    assert kept == [point for point in points if point in kept]
    if points:
        finite = [value for _, value in points if value is not None]
        assert kept[0] == points[0] and kept[-1] == points[-1]
        if finite:
            assert {min(finite), max(finite)} <= {value for _, value in kept}


def slow_average(points: Points) -> Points:
    half = max(2, len(points) // 40)
    result: Points = []
    for i, (step, value) in enumerate(points):
        reach = min(half, i)
        window = [y for _, y in points[i - reach : i + reach + 1] if y is not None]
        result.append((step, None if value is None else math.fsum(window) / len(window)))
    return result


def test_smoothing_is_a_centred_average() -> None:
    draw = random.Random(2)
    points: Points = [(3 * i, None if i % 17 == 5 else draw.gauss(3, 1)) for i in range(500)]
    for (step, fast), (same, slow) in zip(smooth_points(points), slow_average(points), strict=True):
        assert step == same
        assert fast == slow if slow is None else math.isclose(fast or 0.0, slow, abs_tol=1e-9)
    straight: Points = [(i, 5.0 - i / 100) for i in range(200)]
    lag = [abs((a or 0) - (b or 0)) for (_, a), (_, b) in zip(straight, smooth_points(straight), strict=True)][:190]
    assert max(lag) < 1e-9
    assert smooth_points(points[:11]) is not None and smooth_points(points[:11]) == points[:11]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(3, 8))
def test_ticks_are_round_and_inside(low: float, width: float, about: int) -> None:
    high = low + width
    if high - low < 1e-6 * max(abs(low), abs(high)):  # too close for floats to tell round numbers apart
        return
    found = compute_ticks(low, high, about)
    assert 1 <= len(found) <= about + 2
    step = (found[-1] - found[0]) / (len(found) - 1) if len(found) > 1 else 0.0
    assert all(low - 1e-6 * width <= tick <= high + 1e-6 * width for tick in found)
    if step:
        assert math.isclose(float(f"{step:.0e}"), step, rel_tol=1e-5) and f"{step:.0e}"[0] in "125"


@given(curves, curves)
def test_everything_drawn_lies_in_the_picture(train: Points, valid: Points) -> None:
    drawn = draw_chart("t", [Curve("a", train), Curve("b", valid, "points", 2)], text)
    known = [value for _, value in train + valid if value is not None]
    assert (drawn is None) == (not known)
    if drawn is None:
        return
    for path in drawn.paths:
        numbers = [float(word) for word in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", path.d.replace("h0", ""))]
        assert len(numbers) % 2 == 0 and all(0 <= number <= 1000 for number in numbers)
    for position, _ in drawn.x_ticks + drawn.y_ticks:
        assert -0.1 <= position <= 100.1


def test_gaps_and_lone_points() -> None:
    points: Points = [(0, 1.0), (1, None), (2, 2.0), (3, 3.0), (4, None), (5, 1.0)]
    drawn = draw_chart("t", [Curve("a", points)], text)
    assert drawn is not None
    assert re.sub(r"[\d.]+ [\d.]+", "_", drawn.paths[0].d) == "M_h0M_L_M_h0"


def test_a_few_wild_points_do_not_flatten_the_rest() -> None:
    points: Points = [(step, 1.0 + step % 7 / 100) for step in range(1000)]
    points[500] = (500, 250.0)
    drawn = draw_chart("t", [Curve("a", points)], text, zero=True)
    assert drawn is not None and drawn.note and drawn.note.en == "1 point lies beyond the axis"
    assert max(float(label) for _, label in drawn.y_ticks) <= 1.2
    assert min(float(word) for word in re.findall(r"[ML][\d.]+ (-?[\d.]+)", drawn.paths[0].d)) == 0.0
    assert min(drawn.data["series"][0]["y"]) == 0.0


def test_marks_outside_are_left_out() -> None:
    points: Points = [(10, 1.0), (20, 2.0)]
    drawn = draw_chart("t", [Curve("a", points)], text, marks=[(5, "early"), (15, "resumed")])
    assert drawn is not None and [(x, mark.en) for x, mark in drawn.marks] == [(50.0, "resumed")]
