"""The one global sequence of micro-batches that all ranks agree on. It reads lengths, never tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from anabatic.core.errors import ConfigError, DataError
from anabatic.data.batching.packing import choose_best_fit
from anabatic.data.batching.shuffle import ShuffledOrder, splitmix64_hash
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.data.shards.reader import EntryLocation, ShardSet, ShardSubset


def check_sizes(seq_len: int, micro_batch_tokens: int, rank: int, world_size: int) -> None:
    """Make sure that a segment fits into a micro-batch and the rank into the world.

    Raises:
        ConfigError: it does not.
    """
    if not 2 <= seq_len <= micro_batch_tokens:
        raise ConfigError(
            f"batch.micro_batch_tokens is {micro_batch_tokens}, batch.seq_len is {seq_len}",
            "batch.seq_len must be at least 2 and a micro-batch must hold at least one segment of it",
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size} ranks", "ranks count from 0")


class PlannedSegment(NamedTuple):
    """A piece of a micro-batch, not read yet: `num_inputs` inputs of an entry of a source, from `start` on. The entry
    is number `row` of its source, in pass `epoch` over it."""

    source: int
    entry: EntryLocation
    start: int
    num_inputs: int
    row: int
    epoch: int


class MixtureStage(NamedTuple):
    """Part of a curriculum: from global micro-batch `first_micro_batch` on, `source_fractions` of the conversations
    drawn; they sum to 1."""

    first_micro_batch: int
    source_fractions: tuple[float, ...]


class _WaitingConversation(NamedTuple):
    draw: int
    entry: EntryLocation
    num_inputs: int
    row: int


class _SourceCursor:
    """Where the stream stands in one source.

    Text is taken in order of the shuffled entries and cut wherever a piece or a micro-batch is full.
    Conversations wait in a short line, from which the oldest that fits, or the best fit, is taken.
    """

    def __init__(
        self, number: int, shards: ShardSet | ShardSubset | SequenceDataset, seq_len: int, key: int, lookahead: int
    ) -> None:
        self.source_index = number
        self._shards = shards
        self._seq_len = seq_len
        self._order = ShuffledOrder(shards.num_docs, key)
        self._lookahead = min(lookahead, shards.num_docs)
        self._next_draw = 0
        self._start_token = 0
        self._current_entry: EntryLocation | None = None
        self._waiting: list[_WaitingConversation] = []
        self.tokens_drawn = 0
        self.samples_drawn = 0

    def take_segment(self, room: int) -> PlannedSegment | None:
        """Return the next piece of at most `room` tokens, or `None` when no conversation fits."""
        slot = self._take_conversation(room) if self._shards.is_chat else self._take_text_segment(room)
        if slot is not None:
            self.tokens_drawn += slot.num_inputs
            self.samples_drawn += 1
        return slot

    def _take_text_segment(self, room: int) -> PlannedSegment:
        while self._current_entry is None or self._start_token >= self._current_entry.num_inputs:
            if self._current_entry is not None:
                self._next_draw, self._start_token = self._next_draw + 1, 0
            self._current_entry = self._shards.locate_entry(self._order[self._next_draw])
        n = min(self._current_entry.num_inputs - self._start_token, self._seq_len, room)
        self._start_token += n
        turn = self._next_draw // self._shards.num_docs
        return PlannedSegment(
            self.source_index, self._current_entry, self._start_token - n, n, self._order[self._next_draw], turn
        )

    def _take_conversation(self, room: int) -> PlannedSegment | None:
        while len(self._waiting) < self._lookahead:
            self._waiting.append(self._draw_conversation(self._next_draw))
            self._next_draw += 1
        at = choose_best_fit([waiting.num_inputs for waiting in self._waiting], room)
        if at is None:
            return None
        draw, entry, n, row = self._waiting.pop(at)
        return PlannedSegment(self.source_index, entry, 0, n, row, draw // self._shards.num_docs)

    def _draw_conversation(self, draw: int) -> _WaitingConversation:
        row = self._order[draw]
        entry = self._shards.locate_entry(row, draw // self._shards.num_docs)
        return _WaitingConversation(draw, entry, min(entry.num_inputs, self._seq_len), row)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: draws so far, tokens used of the current text, conversations that wait."""
        waiting = [waiting.draw for waiting in self._waiting]
        return {
            "next": self._next_draw,
            "start": self._start_token,
            "drawn": self.tokens_drawn,
            "samples": self.samples_drawn,
            "waiting": waiting,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next_draw, self._start_token, self.tokens_drawn = state["next"], state["start"], state["drawn"]
        self.samples_drawn = state["samples"]
        self._waiting = [self._draw_conversation(draw) for draw in state["waiting"]]
        self._current_entry = None if self._shards.is_chat else self._shards.locate_entry(self._order[self._next_draw])


class MicroBatchStream:
    """Plans micro-batch after micro-batch from a weighted mixture of sources.

    The next piece comes from the source that is furthest behind its share of the tokens drawn so far; when
    none of its conversations fits into what is left of the micro-batch, from the next one behind. Text fits
    always, so a mixture with text has no padding.

    Args:
        sources: shard sets and their shares, which sum to 1.
        seq_len: longest piece.
        capacity: tokens of a micro-batch.
        seed: of the shuffle.
        lookahead: conversations of a source that wait at a time.
        stages: a curriculum, which takes the place of the shares; the first begins at micro-batch 0.
    """

    def __init__(
        self,
        sources: Sequence[tuple[ShardSet | ShardSubset | SequenceDataset, float]],
        *,
        seq_len: int,
        capacity: int,
        seed: int,
        lookahead: int,
        stages: Sequence[MixtureStage] = (),
    ) -> None:
        self._stages = list(stages)
        self._stage_index = 0
        self._samples_before_stage = [0] * len(sources)
        self._weights = [weight for _, weight in sources]
        self._capacity = capacity
        self._cursors = [
            _SourceCursor(number, shards, seq_len, splitmix64_hash(seed, number), lookahead)
            for number, (shards, _) in enumerate(sources)
        ]
        self._layout = {"seed": seed, "sources": [shards.key for shards, _ in sources]}
        self.micro_batch = 0
        self._token_totals = [0, 0]

    def plan_micro_batch(self) -> list[PlannedSegment]:
        """Return the pieces of the next micro-batch."""
        slots: list[PlannedSegment] = []
        room = self._capacity
        self._enter_stage()
        while room and (slot := self._take_most_behind(room)) is not None:
            slots.append(slot)
            room -= slot.num_inputs
        self.micro_batch += 1
        self._count_tokens(slots, self._capacity)
        return slots

    def _enter_stage(self) -> None:
        while (
            self._stage_index + 1 < len(self._stages)
            and self.micro_batch >= self._stages[self._stage_index + 1].first_micro_batch
        ):
            self._stage_index += 1
            self._samples_before_stage = [cursor.samples_drawn for cursor in self._cursors]

    def _count_tokens(self, slots: list[PlannedSegment], placed: int) -> None:
        """Add a micro-batch of `placed` tokens, padding included."""
        self._token_totals[0] += sum(slot.num_inputs for slot in slots)
        self._token_totals[1] += placed

    def _samples_drawn(self) -> list[int]:
        return [cursor.samples_drawn for cursor in self._cursors]

    def _take_most_behind(self, room: int) -> PlannedSegment | None:
        if len(self._cursors) == 1:
            return self._cursors[0].take_segment(room)
        weights = self._stages[self._stage_index].source_fractions if self._stages else self._weights
        candidates = [
            cursor.samples_drawn - before if self._stages else cursor.tokens_drawn
            for cursor, before in zip(self._cursors, self._samples_before_stage, strict=True)
        ]
        total = 1 + sum(candidates)
        behind = [weight * total - each for weight, each in zip(weights, candidates, strict=True)]
        eligible = [number for number in range(len(behind)) if weights[number] > 0.0]
        for number in sorted(eligible, key=lambda number: -behind[number]):
            if (slot := self._cursors[number].take_segment(room)) is not None:
                return slot
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands; JSON-serialisable, a few hundred bytes per source.

        `samples` are the pieces of every source so far, `tokens` those of the data and all, padding included.
        """
        return {
            "micro_batch": self.micro_batch,
            "cursors": [cursor.state_dict() for cursor in self._cursors],
            "layout": self._layout,
            "stage": [self._stage_index, self._samples_before_stage],
            "samples": self._samples_drawn(),
            "tokens": list(self._token_totals),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the state belongs to other sources or another seed.
        """
        saved = state["layout"]
        for name in ("seed", "sources"):
            if saved[name] != self._layout[name]:
                raise DataError(
                    f"the checkpoint was made with other data: {name} {_shorten_keys(saved[name])}, "
                    f"now {_shorten_keys(self._layout[name])}",
                    "restore the run's sources, tokenizer and seed, or start over with --save.resume never",
                )
        self.micro_batch = state["micro_batch"]
        self._token_totals = list(state["tokens"])
        self._stage_index, self._samples_before_stage = state["stage"][0], list(state["stage"][1])
        for cursor, position in zip(self._cursors, state["cursors"], strict=True):
            cursor.load_state_dict(position)


def _shorten_keys(value: Any) -> str:
    return ", ".join(key[:8] for key in value) if isinstance(value, list) else str(value)
