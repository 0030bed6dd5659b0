"""Another run of a sequence's points in every pass, so that a few vessels are harder to learn by heart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anabatic.data.batching.shuffle import splitmix64_hash


@dataclass(frozen=True)
class RandomCrop:
    """Chooses a run of points.

    Attributes:
        point_start_mask: bool `[V]`, words that begin a point.
        min_fraction: share of the points that is read at least.
        seed: of the draw.
    """

    point_start_mask: np.ndarray
    min_fraction: float
    seed: int

    def __call__(self, ids: np.ndarray, number: int, turn: int) -> tuple[int, int]:
        """Return the first word of the run and how many they are; the same for the same sequence and pass."""
        random = np.random.Generator(np.random.SFC64(splitmix64_hash(self.seed, number, turn)))
        borders = np.append(np.flatnonzero(self.point_start_mask[ids]), len(ids))
        points = len(borders) - 1
        if points < 2:
            return 0, len(ids)
        count = int(random.integers(max(1, round(self.min_fraction * points)), points + 1))
        first = int(random.integers(0, points - count + 1))
        return int(borders[first]), int(borders[first + count] - borders[first])
