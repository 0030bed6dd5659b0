"""Numbers of a vessel's day: the means of those of its segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DAY = 86_400
"""Seconds from a vessel's first segment on that make one row of means: a month of a vessel is not told in one."""


def days(vessels: Sequence[str], starts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return which day of which vessel each of `n` segments is of: numbers from 0, none left out.

    Args:
        vessels: `n` ids.
        starts: `n` unix seconds; None, not known: with the vessel's first.
    """
    owners = np.unique(np.asarray(vessels, dtype=str), return_inverse=True)[1]
    time = np.array([np.nan if start is None else float(start) for start in starts], dtype=np.float64)
    begin = np.full(int(owners.max(initial=-1)) + 1, np.inf)
    np.fmin.at(begin, owners, time)
    day = np.nan_to_num(np.floor((time - begin[owners]) / DAY))
    found = np.unique(np.stack([owners, day], axis=1), axis=0, return_inverse=True)[1]
    return found.reshape(-1).astype(np.int64)


def means(numbers: NDArray[np.float32], groups: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the mean of each number in each group.

    Means and neither sums nor extremes: they do not say how many segments a vessel has.

    Args:
        numbers: `n x F`; NaN, not known, is left out.
        groups: `n`, from 0.

    Returns:
        `g x F`; NaN where no segment of the group knows.
    """
    known = np.isfinite(numbers)
    shape = (int(groups.max(initial=-1)) + 1, numbers.shape[1])
    sums, counts = np.zeros(shape), np.zeros(shape)
    np.add.at(sums, groups, np.where(known, numbers, 0.0))
    np.add.at(counts, groups, known)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).astype(np.float32)
