"""Some entries of a shard set, as a set of its own."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from anabatic.data.batching.packing import TokenSegment
from anabatic.data.shards.reader import EntryLocation, ShardSet


class ShardSubset:
    """The entries `chosen` (their numbers, ascending) of a set of conversations; reads like a `ShardSet`."""

    def __init__(self, shard_set: ShardSet, chosen: np.ndarray, name: str) -> None:
        lengths = np.concatenate(
            [shard_set.read_entry_lengths(shard) for shard in range(len(shard_set.meta["shards"]))]
        )
        self._parent, self._entry_indices = shard_set, chosen
        self._entry_lengths = lengths[chosen]
        self.name = f"{shard_set.name} ({name})"
        self.key = hashlib.sha256(shard_set.key.encode() + chosen.tobytes()).hexdigest()
        self.is_chat, self.eot = shard_set.is_chat, shard_set.eot
        self.num_docs = len(chosen)
        self.num_tokens = int(self._entry_lengths.sum())
        self.counts = shard_set.counts
        self.meta: dict[str, Any] = {**shard_set.meta, "shards": [{"docs": self.num_docs}]}

    def locate_entry(self, i: int, turn: int = 0) -> EntryLocation:
        """Return where entry `i` lies, read in pass `turn`."""
        return self._parent.locate_entry(int(self._entry_indices[i]), turn)

    def read_entry_lengths(self, shard: int) -> np.ndarray:
        """Return the inputs of every entry, int64."""
        return self._entry_lengths

    def read_segment(self, entry: EntryLocation, start: int, n: int) -> TokenSegment:
        """Read `n` inputs of an entry."""
        return self._parent.read_segment(entry, start, n)
