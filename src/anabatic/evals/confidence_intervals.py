"""Confidence intervals of 95 %."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_Z_95 = 1.959963984540054
"""Of a normal distribution, 95 % lie within so many standard deviations."""
BOOTSTRAP_DRAWS = 1000
"""Resamples of the bootstrap."""


class Estimate(NamedTuple):
    """A figure and its interval of 95 %.

    Attributes:
        method: `wilson`, `bootstrap` or `normal`.
    """

    value: float
    low: float
    high: float
    method: str


def wilson_interval(right: int, n: int) -> Estimate:
    """Return a share with its score interval (Wilson 1927, doi 10.1080/01621459.1927.10502953)."""
    if not n:
        return Estimate(math.nan, math.nan, math.nan, "wilson")
    proportion, square = right / n, _Z_95 * _Z_95
    centre = (proportion + square / (2 * n)) / (1 + square / n)
    half = _Z_95 / (1 + square / n) * math.sqrt(proportion * (1 - proportion) / n + square / (4 * n * n))
    low = 0.0 if right == 0 else max(0.0, centre - half)
    return Estimate(proportion, low, 1.0 if right == n else min(1.0, centre + half), "wilson")


def bootstrap_interval(rows: np.ndarray, figure: Callable[[np.ndarray], float], seed: int) -> Estimate:
    """Return a figure of rows `[n, ...]` with the percentile interval of `BOOTSTRAP_DRAWS` resamples (Efron 1979)."""
    generator = np.random.default_rng(seed)
    found = sorted(figure(rows[generator.integers(0, len(rows), len(rows))]) for _ in range(BOOTSTRAP_DRAWS))
    low, high = found[int(0.025 * BOOTSTRAP_DRAWS)], found[int(0.975 * BOOTSTRAP_DRAWS) - 1]
    return Estimate(figure(rows), low, high, "bootstrap")


def mean_estimate(figures: Sequence[tuple[Estimate, float]]) -> Estimate:
    """Return the mean of independent figures, each `(figure, factor)` of which the interval is that much wider; normal
    approximation, a standard error being the interval's width / 2z."""
    n = len(figures)
    variance = sum(((one.high - one.low) / (2 * _Z_95) * factor) ** 2 for one, factor in figures)
    value = sum(one.value for one, _ in figures) / n
    half = _Z_95 * math.sqrt(variance) / n
    return Estimate(value, value - half, value + half, "normal")
