"""Batches of one exact pass over held-out data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat

from anabatic.core.errors import DataError
from anabatic.data.batching.mixture import check_sizes
from anabatic.data.batching.packing import (
    Batch,
    CollateFn,
    TokenSegment,
    collate_packed,
    pack_best_fit,
    split_into_segments,
)
from anabatic.data.batching.shuffle import ShuffledOrder
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.data.shards.reader import EntryLocation, ShardSet

_ValidationSegment = tuple[ShardSet | SequenceDataset, EntryLocation, int, int]


class ValidationBatches:
    """This rank's batches of one evaluation. Iterate it as often as needed; every pass is the same.

    Whole entries (documents, parts of long documents, conversations) are taken from every set, in proportion
    to its size, in an order that depends on nothing else, until `max_tokens` is reached. Text is cut into
    pieces of `seq_len` tokens counted from the entry's start, and no piece is split between batches: neither
    the number of ranks nor the size of a micro-batch changes a token's context. The label of a token in front
    of a cut is its true next token.

    Attributes:
        num_bytes: UTF-8 bytes of the targets of all ranks together; bits per byte = nats / ln 2 /
            `num_bytes`. The bytes of a conversation that is cut here (shards built without `seq_len`) are
            scaled by its target tokens.
        num_tokens: inputs of all ranks together.
        entries: what was chosen of the tokenised sets, all ranks together, conversations cut to `seq_len`.
        num_batches: batches per rank, the same for every rank; a rank that has fewer gets batches without
            targets.

    Raises:
        ConfigError: sizes that cannot be.
        DataError: nothing is held out.
    """

    def __init__(
        self,
        shard_sets: Sequence[ShardSet | SequenceDataset],
        seq_len: int,
        micro_batch_tokens: int,
        max_tokens: int,
        rank: int = 0,
        world_size: int = 1,
        lay: CollateFn = collate_packed,
    ) -> None:
        check_sizes(seq_len, micro_batch_tokens, rank, world_size)
        total = sum(shards.num_tokens for shards in shard_sets)
        if total == 0:
            names = ", ".join(shards.name for shards in shard_sets) or "no source"
            raise DataError(
                f"0 tokens of held-out data in {names}",
                "name sources in data.valid, or raise data.valid_fraction",
            )
        self._segments: list[_ValidationSegment] = []
        self.entries: list[tuple[ShardSet, EntryLocation]] = []
        self.num_bytes = 0
        for shards in shard_sets:
            self._choose_entries(shards, max_tokens * shards.num_tokens / total, seq_len)
        self.num_tokens = sum(n for _, _, _, n in self._segments)
        self._batch_indices = list(pack_best_fit([n for _, _, _, n in self._segments], micro_batch_tokens))
        self.num_batches = -(-len(self._batch_indices) // world_size)
        self._seq_len = seq_len
        self._capacity = micro_batch_tokens
        self._eot = shard_sets[0].eot
        self._rank = rank
        self._world_size = world_size
        self._collate_fn = lay

    def _choose_entries(self, shards: ShardSet | SequenceDataset, budget: float, seq_len: int) -> None:
        order, taken = ShuffledOrder(shards.num_docs, 0), 0
        for draw in range(shards.num_docs):
            if taken >= budget:
                return
            number = order[draw]
            entry = shards.locate_entry(number)
            num_bytes = shards.count_entry_bytes(number)
            if shards.is_chat and entry.num_inputs > seq_len:
                mask = shards.read_segment(entry, 0, entry.num_inputs).loss_mask
                assert mask is not None  # every conversation has one
                num_bytes = round(num_bytes * int(mask[: seq_len + 1].sum()) / max(1, int(mask.sum())))
                entry = entry._replace(num_inputs=seq_len)
            self.num_bytes += num_bytes
            if isinstance(shards, ShardSet):
                self.entries.append((shards, entry))
            self._segments.extend(
                (shards, entry, start, n) for start, n in split_into_segments(entry.num_inputs, seq_len)
            )
            taken += entry.num_inputs

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        rank_batches = chain(islice(self._batch_indices, self._rank, None, self._world_size), repeat([]))
        for group in islice(rank_batches, self.num_batches):
            yield self._collate_fn(list(map(self._read_segment, group)), self._capacity, self._eot, self._seq_len, None)

    def _read_segment(self, index: int) -> TokenSegment:
        shards, entry, start, n = self._segments[index]
        return shards.read_segment(entry, start, n)
