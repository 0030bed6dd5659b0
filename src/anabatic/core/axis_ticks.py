"""Round numbers for the axes of plots."""

from __future__ import annotations

import math


def compute_ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Return round numbers (1, 2, 5 x 10^n) from `low` to `high`, `about` of them."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
