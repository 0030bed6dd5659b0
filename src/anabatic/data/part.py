"""Some entries of a shard set, as a set of its own."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from anabatic.data.pack import Piece
from anabatic.data.shard_set import Entry, ShardSet


class Part:
    """The entries `chosen` (their numbers, ascending) of a set of conversations; reads like a `ShardSet`."""

    def __init__(self, whole: ShardSet, chosen: np.ndarray, name: str) -> None:
        lengths = np.concatenate([whole.lengths(shard) for shard in range(len(whole.meta["shards"]))])
        self._whole, self._chosen = whole, chosen
        self._lengths = lengths[chosen]
        self.name = f"{whole.name} ({name})"
        self.key = hashlib.sha256(whole.key.encode() + chosen.tobytes()).hexdigest()
        self.is_chat, self.eot = whole.is_chat, whole.eot
        self.num_docs = len(chosen)
        self.num_tokens = int(self._lengths.sum())
        self.counts = whole.counts
        self.meta: dict[str, Any] = {**whole.meta, "shards": [{"docs": self.num_docs}]}

    def entry(self, i: int, turn: int = 0) -> Entry:
        """Return where entry `i` lies, read in pass `turn`."""
        return self._whole.entry(int(self._chosen[i]), turn)

    def lengths(self, shard: int) -> np.ndarray:
        """Return the inputs of every entry, int64."""
        return self._lengths

    def piece(self, entry: Entry, start: int, n: int) -> Piece:
        """Read `n` inputs of an entry."""
        return self._whole.piece(entry, start, n)
