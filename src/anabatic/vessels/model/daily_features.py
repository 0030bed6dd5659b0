"""Features of a vessel's day: mean, minimum and maximum over its segments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DAY_SECONDS = 86_400
"""Seconds per row, counted from a vessel's first segment: a month of a vessel is not aggregated to one row."""


def number_days(vessels: Sequence[str], starts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return the day id of each of `n` segments: consecutive numbers from 0, one per vessel and day.

    Args:
        vessels: `n` ids.
        starts: `n` unix seconds; None: unknown, assigned to the first day of the vessel.
    """
    vessel_ids = np.unique(np.asarray(vessels, dtype=str), return_inverse=True)[1]
    time = np.array([np.nan if start is None else float(start) for start in starts], dtype=np.float64)
    first_start = np.full(int(vessel_ids.max(initial=-1)) + 1, np.inf)
    np.fmin.at(first_start, vessel_ids, time)
    day = np.nan_to_num(np.floor((time - first_start[vessel_ids]) / DAY_SECONDS))
    day_ids = np.unique(np.stack([vessel_ids, day], axis=1), axis=0, return_inverse=True)[1]
    return day_ids.reshape(-1).astype(np.int64)


def aggregate_by_day(features: NDArray[np.float32], groups: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return mean, minimum and maximum of each feature in each group.

    Trees on segments do not use them: repeated on every segment of a vessel they would identify the vessel.

    Args:
        features: `n x F`; NaN values are left out.
        groups: `n`, from 0.

    Returns:
        `g x 3F`: all means, then the minima, then the maxima; NaN if unknown in all segments of the group.
    """
    is_known = np.isfinite(features)
    shape = (int(groups.max(initial=-1)) + 1, features.shape[1])
    sums, counts = np.zeros(shape), np.zeros(shape)
    minima, maxima = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.add.at(sums, groups, np.where(is_known, features, 0.0))
    np.add.at(counts, groups, is_known)
    np.minimum.at(minima, groups, np.where(is_known, features, np.inf))
    np.maximum.at(maxima, groups, np.where(is_known, features, -np.inf))
    result = np.concatenate([sums / np.maximum(counts, 1), minima, maxima], axis=1)
    return np.where(np.tile(counts > 0, 3), result, np.nan).astype(np.float32)
