"""Batches for training without end: weighted, shuffled, packed, prefetched, resumable to the token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching.mixture import MicroBatchStream, MixtureStage, check_sizes
from anabatic.data.batching.packing import (
    Batch,
    CollateFn,
    collate_packed,
    collate_padded,
)
from anabatic.data.batching.padding import PaddedMicroBatchStream
from anabatic.data.batching.prefetch import PrefetchIterator
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.data.shards.reader import ShardSet, ShardSubset

WeightedSources = Sequence[tuple[ShardSet | ShardSubset | SequenceDataset, "float | None"]]


class Loader:
    """This rank's share of the global stream of micro-batches, for ever.

    Global micro-batch `k` goes to rank `k % world_size`, so the tokens of a step do not depend on how many
    ranks there are. `Batch.loader_state` is the state of the whole stream after the round of `world_size`
    micro-batches that holds the batch: the same on every rank, and enough for any other number of ranks to
    continue at the next token.

    Every target token of a text source comes exactly once per pass over the source; every pass has another
    order. Memory does not grow with the corpus.

    Args:
        sources: shard sets with their share of the tokens; `None` shares what the others leave in proportion
            to size.
        seq_len: longest segment; longer text is cut into several, longer conversations on the right.
        micro_batch_tokens: `T`, tokens of every batch; without packing the most that a batch has.
        rank: of this process.
        world_size: number of ranks.
        seed: of the shuffle.
        state: of a batch after which to continue.
        prefetch: batches read ahead by a background thread.
        pin_memory: put the tensors into page-locked memory, from which copies to the device do not block.
        lookahead: conversations that wait for a place that fits.
        stages: a curriculum; the sources' shares then play no part.
        packing: lay segments side by side without padding; else a batch is rows of like length, padded to the
            longest, as many as fit.
        lay: makes a packed batch of the pieces that were chosen for it.

    Raises:
        ConfigError: sizes, ranks or weights that cannot be.
        DataError: a source without tokens; a state that belongs to other data.
    """

    def __init__(
        self,
        sources: WeightedSources,
        *,
        seq_len: int,
        micro_batch_tokens: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        state: dict[str, Any] | None = None,
        prefetch: int = 4,
        pin_memory: bool = False,
        lookahead: int = 64,
        stages: Sequence[MixtureStage] = (),
        packing: bool = True,
        lay: CollateFn = collate_packed,
    ) -> None:
        check_sizes(seq_len, micro_batch_tokens, rank, world_size)
        self._sets = [shards for shards, _ in sources]
        self.weights = resolve_source_weights(sources)
        self.epoch_tokens = sum(_count_epoch_tokens(shards, seq_len) for shards in self._sets)
        self._rank = rank
        self._world_size = world_size
        collate = lay if packing else collate_padded
        self._read_batch = partial(read_batch, self._sets, seq_len, micro_batch_tokens, pin_memory, collate)
        self._packing, self._lookahead, self._prefetch = packing, lookahead, prefetch
        self._options: dict[str, Any] = {
            "seq_len": seq_len,
            "capacity": micro_batch_tokens,
            "seed": seed,
            "stages": stages,
        }
        self._batches = self._start_stream(state)

    @property
    def source_names(self) -> list[str]:
        """The sources, as `Batch.segment_origins` numbers them."""
        return [shards.name for shards in self._sets]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that `state` is of; what was read ahead is dropped."""
        self._batches.close()
        self._batches = self._start_stream(state)

    def _start_stream(self, state: dict[str, Any] | None) -> PrefetchIterator[Batch]:
        weighted = list(zip(self._sets, self.weights, strict=True))
        stream: MicroBatchStream
        if self._packing:
            stream = MicroBatchStream(weighted, lookahead=self._lookahead, **self._options)
        else:
            stream = PaddedMicroBatchStream(weighted, **self._options)
        if state is not None:
            stream.load_state_dict(state)
        batches = _iter_rank_batches(self._read_batch, stream, self._rank, self._world_size)
        return PrefetchIterator(batches, self._prefetch, "loader")

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Stop the background thread; the loader ends."""
        self._batches.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_batch(
    sets: list[ShardSet | ShardSubset | SequenceDataset],
    seq_len: int,
    capacity: int,
    pin_memory: bool,
    collate: CollateFn,
    slots: list[Any],
    state: dict[str, Any],
) -> Batch:
    """Turn planned slots into a batch."""
    pieces = [sets[slot.source].read_segment(slot.entry, slot.start, slot.num_inputs) for slot in slots]
    batch = collate(pieces, capacity, sets[0].eot, seq_len, state)
    batch.segment_origins = [(slot.source, slot.row, slot.epoch, slot.start, slot.num_inputs) for slot in slots]
    if pin_memory:
        for name in ("input_ids", "labels", "position_ids"):
            setattr(batch, name, getattr(batch, name).pin_memory())
        batch.extra = {name: value.pin_memory() for name, value in batch.extra.items()}
    return batch


def _iter_rank_batches(
    read: Callable[[list[Any], dict[str, Any]], Batch], stream: MicroBatchStream, rank: int, world_size: int
) -> Iterator[Batch]:
    """Yield a rank's batches. Knows nothing of the `Loader`, so that a forgotten one can be collected."""
    while True:
        rank_batches: list[Any] = []
        for _ in range(world_size):
            number, slots = stream.micro_batch, stream.plan_micro_batch()
            if number % world_size == rank:
                rank_batches = slots
        yield read(rank_batches, stream.state_dict())


def resolve_source_weights(sources: WeightedSources) -> list[float]:
    """Return every source's share of the tokens; they sum to 1.

    Raises:
        ConfigError: no source, a weight that is not above 0, weights that exceed 1, leave nothing or leave a
            gap.
        DataError: a source without tokens.
    """
    if not sources:
        raise ConfigError("no data source", "name one in data.train")
    for shards, weight in sources:
        if shards.num_tokens == 0 or shards.num_docs == 0:
            raise DataError(
                f"{shards.name}: 0 tokens ({_describe_dropped(shards)})",
                "give shorter rows, or keep other parts with truncation_strategy: left or split, or raise batch.seq_len"
                " if the model has the positions"
                if shards.counts.get("too_long")
                else "give more documents, or leave the source out",
            )
        if weight is not None and not 0.0 < weight <= 1.0:
            raise ConfigError(f"{shards.name}: the weight is {weight:g}", "use a share above 0 and at most 1")
    given = sum(weight for _, weight in sources if weight is not None)
    free = sum(shards.num_tokens for shards, weight in sources if weight is None)
    if given > 1.0 + 1e-6 or (free and given > 1.0 - 1e-6):
        rest = ", which leaves nothing for the sources without one" if free else ", more than 1"
        raise ConfigError(f"the weights of the data sources add up to {given:g}{rest}", "lower some of them")
    if not free and given < 1.0 - 1e-6:
        raise ConfigError(f"the weights of the data sources add up to {given:g}, less than 1", "raise some of them")
    return [(1.0 - given) * shards.num_tokens / free if weight is None else weight for shards, weight in sources]


def _describe_dropped(shards: ShardSet | ShardSubset | SequenceDataset) -> str:
    counts = (f"{name.replace('_', ' ')} {number:,}" for name, number in shards.counts.items() if number)
    return ", ".join(counts) or "no rows"


def _count_epoch_tokens(shards: ShardSet | ShardSubset | SequenceDataset, seq_len: int) -> int:
    """Return the inputs of one pass; conversations that are cut here, not when they were tokenised, are
    reported.
    """
    built_for = shards.meta["seq_len"]
    if not shards.is_chat or (built_for is not None and built_for <= seq_len):
        return shards.num_tokens
    total = cut = 0
    for shard in range(len(shards.meta["shards"])):
        lengths = shards.read_entry_lengths(shard)
        total += int(np.minimum(lengths, seq_len).sum())
        cut += int(np.count_nonzero(lengths > seq_len))
    if cut:
        fraction = cut / shards.num_docs
        log.warn(f"{shards.name}: {cut:,} conversations ({fraction:.1%}) are cut to {seq_len} tokens on the right")
    return total


def list_source_kinds(
    parts: Sequence[ShardSet | ShardSubset | SequenceDataset], row_kind: str = "conversations"
) -> list[dict[str, str]]:
    """Return the source and the kind of each part, every pair once: `text`, `sequences`, or the kind of rows."""
    pairs = [
        (part.name, "sequences" if isinstance(part, SequenceDataset) else row_kind if part.is_chat else "text")
        for part in parts
    ]
    return [{"source": source, "kind": kind} for source, kind in dict.fromkeys(pairs)]
