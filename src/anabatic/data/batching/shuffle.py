"""Shuffling without memory: a keyed permutation of 0..n-1 that is computed, not stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.uint64]

_ROUNDS = 6
_BLOCK = 1024


def splitmix64_hash(*parts: int) -> int:
    """Hash integers into 64 bits by chaining the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def _splitmix64_array(values: Values, key: int) -> Values:
    """SplitMix64's finaliser of `values + key`, elementwise; uint64 in, uint64 out."""
    state = values + np.uint64(key)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Values = state ^ (state >> np.uint64(31))
    return mixed


def permute_indices(positions: np.ndarray, n: int, key: int) -> np.ndarray:
    """Map distinct positions in 0..n-1 to distinct values in 0..n-1.

    A Feistel network on the pair (left, right) of a grid of ceil(sqrt(n)) rows that holds `n`; what falls
    outside 0..n-1 walks on along its cycle until it is inside (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains").

    Args:
        positions: int64 array.
        n: size of the domain, at least 1.
        key: 64-bit key; another key is another permutation.
    """
    rows = max(1, int(np.ceil(np.sqrt(n))))
    columns = -(-n // rows)
    keys = [splitmix64_hash(key, turn) for turn in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        values[outside] = _apply_feistel_network(values[outside], rows, columns, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _apply_feistel_network(values: Values, rows: int, columns: int, keys: list[int]) -> Values:
    left, right = values // np.uint64(columns), values % np.uint64(columns)
    for turn in range(0, len(keys), 2):
        left = (left + _splitmix64_array(right, keys[turn]) % np.uint64(rows)) % np.uint64(rows)
        right = (right + _splitmix64_array(left, keys[turn + 1]) % np.uint64(columns)) % np.uint64(columns)
    values = left * np.uint64(columns) + right
    return values


class ShuffledOrder:
    """A source's entries in an endless order: draw `d` is position `d % n` of the order of epoch `d // n`."""

    def __init__(self, n: int, key: int) -> None:
        self.num_entries = n
        self._key = key
        self._start = -1
        self._block: list[int] = []

    def __getitem__(self, draw: int) -> int:
        """Return the entry of a draw; neighbouring draws are computed together."""
        at = draw - self._start
        if self._start < 0 or not 0 <= at < len(self._block):
            epoch, position = divmod(draw, self.num_entries)
            first = position - position % _BLOCK
            indices = np.arange(first, min(first + _BLOCK, self.num_entries), dtype=np.int64)
            self._block = permute_indices(indices, self.num_entries, splitmix64_hash(self._key, epoch)).tolist()
            self._start = epoch * self.num_entries + first
            at = draw - self._start
        return self._block[at]
