"""Round numbers for the axes of plots."""

from __future__ import annotations

import math


def compute_ticks(low: float, high: float, num_ticks: int, *, integers_only: bool = False) -> list[float]:
    """Return about `num_ticks` round numbers (1, 2, 5 x 10^n) from `low` to `high`."""
    raw = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if integers_only:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
