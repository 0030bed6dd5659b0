"""Groups of equal and of similar texts, by MinHash and locality-sensitive hashing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anabatic.data.inspection.fingerprints import (
    DUPLICATE_NGRAM_BYTES,
    SIGNATURE_SIZE,
    compute_signature,
)
from anabatic.data.inspection.row_text import RowText

BAND_ROWS = 6
"""Bins of a band. Texts of Jaccard similarity J share one of 21 bands with the probability 1 - (1 - J**6)**21: 0.93 at
0.7, 0.998 at 0.8, 0.28 at 0.5 (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.2)."""
_BANDS = SIGNATURE_SIZE // BAND_ROWS
_PAIR_BLOCK = 65_536


class DuplicateIndex:
    """Texts in the order they were added. About 0.6 KiB of memory a text.

    Args:
        near: look for similar texts, too.
    """

    def __init__(self, near: bool = True) -> None:
        self._near = near
        self._first_of_hash: dict[int, int] = {}
        self._exact: dict[int, int] = {}
        self._signatures = np.empty((1024 if near else 0, SIGNATURE_SIZE), np.uint32)
        self._signed: list[int] = []
        self.num_texts = 0

    def add_row(self, row: RowText) -> int:
        """Add a row; return the number of the first row equal to it (white space apart), or its own."""
        number = self.num_texts
        self.num_texts += 1
        first = self._first_of_hash.setdefault(row.hash_whole(row.text), number)
        if first != number:
            self._exact[number] = first
        elif self._near and len(hashes := row.hash_ngrams(DUPLICATE_NGRAM_BYTES)):
            if len(self._signed) == len(self._signatures):
                self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)])
            self._signatures[len(self._signed)] = compute_signature(hashes)
            self._signed.append(number)
        return first

    @property
    def exact_duplicates(self) -> dict[int, int]:
        """Number of a text -> number of the first text that equals it; first texts are not in it."""
        return self._exact

    def find_near_duplicates(self, similarity: float = 0.8) -> dict[int, tuple[int, float]]:
        """Return number of a text -> (number of an earlier text like it, estimated Jaccard similarity).

        Of a group of similar texts the first is not in it; each other is, with the first member of its group that it
        was compared with. Equal rows are left out: `exact_duplicates` has them.

        Args:
            similarity: least Jaccard similarity of the sets of n-grams, from 0.7 up (below it, many are not found).
        """
        count = len(self._signed)
        signatures = self._signatures[:count]
        near: dict[int, tuple[int, float]] = {}
        for pairs in _iter_candidates(signatures):
            same = np.count_nonzero(signatures[pairs[:, 0]] == signatures[pairs[:, 1]], axis=1) / SIGNATURE_SIZE
            alike = same >= similarity
            for (low, high), value in zip(pairs[alike].tolist(), same[alike].tolist(), strict=True):
                known = near.get(high)
                if known is None or low < known[0]:
                    near[high] = (low, value)
        numbers = self._signed
        return {numbers[high]: (numbers[low], value) for high, (low, value) in sorted(near.items())}


def _iter_candidates(signatures: np.ndarray) -> Iterator[np.ndarray]:
    """Yield pairs (lower, higher index) `[n, 2]` that share a band: each text with the one before it and the first."""
    for band in range(_BANDS if len(signatures) > 1 else 0):
        columns = np.ascontiguousarray(signatures[:, band * BAND_ROWS : (band + 1) * BAND_ROWS])
        keys = columns.view(f"V{columns.itemsize * BAND_ROWS}").ravel()
        _, groups = np.unique(keys, return_inverse=True)
        order = np.argsort(groups, kind="stable")
        ordered = groups[order]
        begins = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        firsts = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
        member = np.flatnonzero(~begins)
        pairs = np.concatenate(
            [np.stack([order[member - 1], order[member]], 1), np.stack([firsts[member], order[member]], 1)]
        )
        for start in range(0, len(pairs), _PAIR_BLOCK):
            yield pairs[start : start + _PAIR_BLOCK]
