"""The one global sequence of micro-batches that all ranks agree on. It reads lengths, never tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from anabatic.core.errors import ConfigError, DataError
from anabatic.data.order import Order, mix
from anabatic.data.pack import choose
from anabatic.data.part import Part
from anabatic.data.sequences import Sequences
from anabatic.data.shard_set import Entry, ShardSet


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


class Slot(NamedTuple):
    """A piece of a micro-batch, not read yet: `n` inputs of an entry of a source, from `start` on. The entry is number
    `row` of its source, in pass `turn` over it."""

    source: int
    entry: Entry
    start: int
    n: int
    row: int
    turn: int


class Stage(NamedTuple):
    """Part of a curriculum: from global micro-batch `first` on, `shares` of the conversations drawn; they sum to 1."""

    first: int
    shares: tuple[float, ...]


class _Waiting(NamedTuple):
    draw: int
    entry: Entry
    n: int
    row: int


class _Cursor:
    """Where the stream stands in one source.

    Text is taken in order of the shuffled entries and cut wherever a piece or a micro-batch is full.
    Conversations wait in a short line, from which the oldest that fits, or the best fit, is taken.
    """

    def __init__(
        self, number: int, shards: ShardSet | Part | Sequences, seq_len: int, key: int, lookahead: int
    ) -> None:
        self.number = number
        self._shards = shards
        self._seq_len = seq_len
        self._order = Order(shards.num_docs, key)
        self._lookahead = min(lookahead, shards.num_docs)
        self._next = 0
        self._start = 0
        self._current: Entry | None = None
        self._waiting: list[_Waiting] = []
        self.drawn = 0
        self.samples = 0

    def take(self, room: int) -> Slot | None:
        """Return the next piece of at most `room` tokens, or `None` when no conversation fits."""
        slot = self._take_whole(room) if self._shards.is_chat else self._take_text(room)
        if slot is not None:
            self.drawn += slot.n
            self.samples += 1
        return slot

    def _take_text(self, room: int) -> Slot:
        while self._current is None or self._start >= self._current.length:
            if self._current is not None:
                self._next, self._start = self._next + 1, 0
            self._current = self._shards.entry(self._order[self._next])
        n = min(self._current.length - self._start, self._seq_len, room)
        self._start += n
        turn = self._next // self._shards.num_docs
        return Slot(self.number, self._current, self._start - n, n, self._order[self._next], turn)

    def _take_whole(self, room: int) -> Slot | None:
        while len(self._waiting) < self._lookahead:
            self._waiting.append(self._draw(self._next))
            self._next += 1
        at = choose([waiting.n for waiting in self._waiting], room)
        if at is None:
            return None
        draw, entry, n, row = self._waiting.pop(at)
        return Slot(self.number, entry, 0, n, row, draw // self._shards.num_docs)

    def _draw(self, draw: int) -> _Waiting:
        row = self._order[draw]
        entry = self._shards.entry(row, draw // self._shards.num_docs)
        return _Waiting(draw, entry, min(entry.length, self._seq_len), row)

    def state(self) -> dict[str, Any]:
        """Return the position: draws so far, tokens used of the current text, conversations that wait."""
        waiting = [waiting.draw for waiting in self._waiting]
        return {
            "next": self._next,
            "start": self._start,
            "drawn": self.drawn,
            "samples": self.samples,
            "waiting": waiting,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._next, self._start, self.drawn = state["next"], state["start"], state["drawn"]
        self.samples = state["samples"]
        self._waiting = [self._draw(draw) for draw in state["waiting"]]
        self._current = None if self._shards.is_chat else self._shards.entry(self._order[self._next])


class Stream:
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
        sources: Sequence[tuple[ShardSet | Part | Sequences, float]],
        *,
        seq_len: int,
        capacity: int,
        seed: int,
        lookahead: int,
        stages: Sequence[Stage] = (),
    ) -> None:
        self._stages = list(stages)
        self._stage = 0
        self._before = [0] * len(sources)
        self._weights = [weight for _, weight in sources]
        self._capacity = capacity
        self._cursors = [
            _Cursor(number, shards, seq_len, mix(seed, number), lookahead) for number, (shards, _) in enumerate(sources)
        ]
        self._layout = {"seed": seed, "sources": [shards.key for shards, _ in sources]}
        self.micro_batch = 0
        self._tokens = [0, 0]

    def plan(self) -> list[Slot]:
        """Return the pieces of the next micro-batch."""
        slots: list[Slot] = []
        room = self._capacity
        self._enter_stage()
        while room and (slot := self._take(room)) is not None:
            slots.append(slot)
            room -= slot.n
        self.micro_batch += 1
        self._count(slots, self._capacity)
        return slots

    def _enter_stage(self) -> None:
        while self._stage + 1 < len(self._stages) and self.micro_batch >= self._stages[self._stage + 1].first:
            self._stage += 1
            self._before = [cursor.samples for cursor in self._cursors]

    def _count(self, slots: list[Slot], placed: int) -> None:
        """Add a micro-batch of `placed` tokens, padding included."""
        self._tokens[0] += sum(slot.n for slot in slots)
        self._tokens[1] += placed

    def _samples(self) -> list[int]:
        return [cursor.samples for cursor in self._cursors]

    def _take(self, room: int) -> Slot | None:
        if len(self._cursors) == 1:
            return self._cursors[0].take(room)
        weights = self._stages[self._stage].shares if self._stages else self._weights
        drawn = [
            cursor.samples - before if self._stages else cursor.drawn
            for cursor, before in zip(self._cursors, self._before, strict=True)
        ]
        total = 1 + sum(drawn)
        behind = [weight * total - each for weight, each in zip(weights, drawn, strict=True)]
        wanted = [number for number in range(len(behind)) if weights[number] > 0.0]
        for number in sorted(wanted, key=lambda number: -behind[number]):
            if (slot := self._cursors[number].take(room)) is not None:
                return slot
        return None

    def state(self) -> dict[str, Any]:
        """Return where the stream stands; JSON-serialisable, a few hundred bytes per source.

        `samples` are the pieces of every source so far, `tokens` those of the data and all, padding included.
        """
        return {
            "micro_batch": self.micro_batch,
            "cursors": [cursor.state() for cursor in self._cursors],
            "layout": self._layout,
            "stage": [self._stage, self._before],
            "samples": self._samples(),
            "tokens": list(self._tokens),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DataError: the state belongs to other sources or another seed.
        """
        saved = state["layout"]
        for name in ("seed", "sources"):
            if saved[name] != self._layout[name]:
                raise DataError(
                    f"the checkpoint was made with other data: {name} {_short(saved[name])}, "
                    f"now {_short(self._layout[name])}",
                    "restore the run's sources, tokenizer and seed, or start over with --save.resume never",
                )
        self.micro_batch = state["micro_batch"]
        self._tokens = list(state["tokens"])
        self._stage, self._before = state["stage"][0], list(state["stage"][1])
        for cursor, position in zip(self._cursors, state["cursors"], strict=True):
            cursor.restore(position)


def _short(value: Any) -> str:
    return ", ".join(key[:8] for key in value) if isinstance(value, list) else str(value)
