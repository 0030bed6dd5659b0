"""Numbers of a vessel's day: mean, least and most of those of its segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DAY_SECONDS = 86_400
"""Seconds from a vessel's first segment on that make one row: a month of a vessel is not told in one."""


def number_days(vessels: Sequence[str], starts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return which day of which vessel each of `n` segments is of: numbers from 0, none left out.

    Args:
        vessels: `n` ids.
        starts: `n` unix seconds; None, not known: with the vessel's first.
    """
    owners = np.unique(np.asarray(vessels, dtype=str), return_inverse=True)[1]
    time = np.array([np.nan if start is None else float(start) for start in starts], dtype=np.float64)
    begin = np.full(int(owners.max(initial=-1)) + 1, np.inf)
    np.fmin.at(begin, owners, time)
    day = np.nan_to_num(np.floor((time - begin[owners]) / DAY_SECONDS))
    found = np.unique(np.stack([owners, day], axis=1), axis=0, return_inverse=True)[1]
    return found.reshape(-1).astype(np.int64)


def aggregate_by_day(numbers: NDArray[np.float32], groups: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return mean, least and most of each number in each group.

    Trees on segments do not see them: repeated on every segment of a vessel they would name the vessel.

    Args:
        numbers: `n x F`; NaN, not known, is left out.
        groups: `n`, from 0.

    Returns:
        `g x 3F`: all means, then the least, then the most; NaN where no segment of the group knows.
    """
    known = np.isfinite(numbers)
    shape = (int(groups.max(initial=-1)) + 1, numbers.shape[1])
    sums, counts = np.zeros(shape), np.zeros(shape)
    least, most = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.add.at(sums, groups, np.where(known, numbers, 0.0))
    np.add.at(counts, groups, known)
    np.minimum.at(least, groups, np.where(known, numbers, np.inf))
    np.maximum.at(most, groups, np.where(known, numbers, -np.inf))
    found = np.concatenate([sums / np.maximum(counts, 1), least, most], axis=1)
    return np.where(np.tile(counts > 0, 3), found, np.nan).astype(np.float32)
