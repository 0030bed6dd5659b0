"""Held-out rows that training data gives away: the same row, the same question, or most of the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from anabatic.data.inspection.fingerprints import LEAK_NGRAM_BYTES
from anabatic.data.inspection.row_text import RowText

LEAK_SHARE = 0.7
"""Share of a row's n-grams that training data has, from which the row counts as leaked: as in PaLM, section 8, for
8-grams of words (https://arxiv.org/abs/2204.02311)."""
MAX_ROW_NGRAMS = 4096
"""n-grams kept of a row; of longer ones those with the smallest hashes, which are the same in every text."""
_FILTER_BITS = np.uint64(64 - 24)

LeakKind = Literal["same row", "same question", "same text"]


@dataclass(frozen=True)
class Leak:
    """One held-out row that training data gives away.

    Attributes:
        row: number of the held-out row, from 0, as added.
        train_row: number of the training row, from 0; of a text spread over several, the one with most of it.
        share: share of the row's n-grams that training data has; 1 for equal rows and questions.
    """

    kind: LeakKind
    row: int
    train_row: int
    share: float = 1.0


class LeakIndex:
    """Held-out rows, and what of them training rows have.

    At most 80 KiB of memory a held-out row; training rows take none.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}
        self._questions: dict[int, list[int]] = {}
        self._ngrams: list[np.ndarray] = []
        self._leaks: dict[int, Leak] = {}
        self._known = np.empty(0, np.uint64)
        self._seen_in = np.empty(0, np.int64)
        self._filter = np.zeros(0, np.bool_)

    def add_held_out(self, row: RowText) -> None:
        """Add a held-out row, before any training row."""
        number = len(self._ngrams)
        for index, key in self._list_keys(row):
            index.setdefault(key, []).append(number)
        self._ngrams.append(np.unique(row.hash_ngrams(LEAK_NGRAM_BYTES))[:MAX_ROW_NGRAMS])

    def start_training_rows(self) -> None:
        """Prepare for `add_training`."""
        self._known = np.unique(np.concatenate(self._ngrams)) if self._ngrams else self._known
        self._seen_in = np.full(len(self._known), -1, np.int64)
        self._filter = np.zeros(2**24, np.bool_)
        self._filter[self._known >> _FILTER_BITS] = True

    def add_training(self, number: int, row: RowText) -> None:
        """Look for a training row among the held-out ones."""
        for index, key in self._list_keys(row):
            for held in index.get(key, ()):
                self._record(Leak("same row" if index is self._rows else "same question", held, number))
        hashes = row.hash_ngrams(LEAK_NGRAM_BYTES)
        hashes = hashes[self._filter[hashes >> _FILTER_BITS]]
        if len(hashes) and len(self._known):
            found = np.minimum(np.searchsorted(self._known, hashes), len(self._known) - 1)
            found = found[self._known[found] == hashes]
            self._seen_in[found[self._seen_in[found] < 0]] = number

    def _list_keys(self, row: RowText) -> Iterator[tuple[dict[int, list[int]], int]]:
        yield self._rows, row.hash_whole(row.text)
        if row.question:
            yield self._questions, row.hash_whole(row.question)

    def _record(self, leak: Leak) -> None:
        known = self._leaks.get(leak.row)
        if known is None or (known.kind == "same question" and leak.kind == "same row"):
            self._leaks[leak.row] = leak

    def find_leaks(self) -> list[Leak]:
        """Return one leak of each held-out row that has one, in the order of the rows."""
        return sorted([*self._leaks.values(), *self._find_covered()], key=lambda leak: leak.row)

    def _find_covered(self) -> Iterator[Leak]:
        for row, ngrams in enumerate(self._ngrams):
            if row in self._leaks or not len(ngrams):
                continue
            seen = self._seen_in[np.searchsorted(self._known, ngrams)]
            sources = seen[seen >= 0]
            if len(sources) >= LEAK_SHARE * len(ngrams):
                ((train_row, _),) = Counter(sources.tolist()).most_common(1)
                yield Leak("same text", row, train_row, len(sources) / len(ngrams))
