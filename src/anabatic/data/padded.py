"""Padded micro-batches, for comparison with packed ones: rows of like length, each padded to the longest.

Rows are drawn as for packing, a window of them at a time; a window is sorted by length, cut into batches, and the
batches are shuffled. Every row of a source comes once per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anabatic.core.errors import ConfigError
from anabatic.data.order import mix, permute
from anabatic.data.part import Part
from anabatic.data.sequences import Sequences
from anabatic.data.shard_set import ShardSet
from anabatic.data.stream import Slot, Stage, Stream

WINDOW = 64
"""Full micro-batches that the rows of a window would make without padding."""


def groups(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Return the indices of the rows of each batch, longest rows first.

    A batch takes rows in order of length for as long as `rows x longest` is at most `capacity`.
    """
    order = np.argsort(-lengths, kind="stable")
    made, start = [], 0
    while start < len(order):
        stop = start + max(1, capacity // int(lengths[order[start]]))
        made.append(order[start:stop])
        start = stop
    return made


def one_pass(sets: Sequence[ShardSet | Part | Sequences], seq_len: int, capacity: int, seed: int) -> tuple[int, float]:
    """Return the micro-batches of one pass over all conversations, and the share of padding in them.

    Of several windows another order makes slightly other numbers; one window has none but these.
    """
    lengths = np.minimum(np.concatenate([each.lengths(n) for each in sets for n in range(_shards(each))]), seq_len)
    lengths = lengths[permute(np.arange(len(lengths)), len(lengths), mix(seed))]
    window = (np.cumsum(lengths) - lengths) // (WINDOW * capacity)
    batches = placed = 0
    for rows in np.split(lengths, np.flatnonzero(np.diff(window)) + 1):
        made = groups(rows, capacity)
        batches += len(made)
        placed += sum(len(one) * int(rows[one[0]]) for one in made)
    return batches, 1.0 - float(lengths.sum()) / placed


def _shards(one: ShardSet | Part | Sequences) -> int:
    return len(one.meta["shards"])


def require_rows(sets: Sequence[ShardSet | Part | Sequences]) -> None:
    """Make sure that there are rows to pad: a text has none, it is cut wherever a batch is full.

    Raises:
        ConfigError: a source is plain text.
    """
    texts = [one.name for one in sets if not one.is_chat]
    if texts:
        raise ConfigError(
            f"batch.packing is false, and {texts[0]} is plain text, which has no rows to pad",
            "give conversations, or leave batch.packing at true",
        )


class PaddedStream(Stream):
    """As `Stream`, with every micro-batch as rows x longest of at most `capacity` tokens.

    A stage of a curriculum begins with a window of its own: the one before is as short as it must be.

    Raises:
        ConfigError: a source is plain text.
    """

    def __init__(
        self,
        sources: Sequence[tuple[ShardSet | Part | Sequences, float]],
        *,
        seq_len: int,
        capacity: int,
        seed: int,
        stages: Sequence[Stage] = (),
    ) -> None:
        require_rows([shards for shards, _ in sources])
        super().__init__(sources, seq_len=seq_len, capacity=capacity, seed=seed, lookahead=1, stages=stages)
        sizes = [shards.num_docs for shards, _ in sources]
        self._largest, self._rows = self._cursors[int(np.argmax(sizes))], max(sizes)
        self._seed = seed
        self._first = 0
        self._before_window: list[dict[str, Any]] = []
        self._ready: list[list[Slot]] = []
        self._drawn = [0] * len(sources)

    def plan(self) -> list[Slot]:
        """Return the rows of the next micro-batch."""
        if not self._ready:
            self._fill()
        slots = self._ready.pop()
        self.micro_batch += 1
        self._count(slots, len(slots) * max(slot.n for slot in slots))
        return slots

    def _fill(self) -> None:
        self._enter_stage()
        self._first = self.micro_batch
        self._before_window = [cursor.state() for cursor in self._cursors]
        rows = self._draw(None)
        left = self._left_of_stage()
        if left is not None and len(self._groups(rows)) > left:
            for cursor, position in zip(self._cursors, self._before_window, strict=True):
                cursor.restore(position)
            rows = self._draw(self._most_rows(rows, left))
        made = self._groups(rows)
        shuffled = permute(np.arange(len(made)), len(made), mix(self._seed, self._first, 1))
        self._ready = [[rows[row] for row in made[number]] for number in shuffled]

    def _groups(self, rows: list[Slot]) -> list[np.ndarray]:
        return groups(np.asarray([slot.n for slot in rows], dtype=np.int64), self._capacity)

    def _draw(self, count: int | None) -> list[Slot]:
        """Draw `count` rows, or a window: so many tokens, or to the end of the pass over the largest source."""
        rows: list[Slot] = []
        tokens = 0
        while len(rows) < count if count is not None else tokens < WINDOW * self._capacity:
            slot = self._take(self._capacity)
            assert slot is not None  # no row is longer than a micro-batch
            rows.append(slot)
            tokens += slot.n
            if count is None and slot.source == self._largest.number and self._largest.samples % self._rows == 0:
                break
        return rows

    def _most_rows(self, rows: list[Slot], batches: int) -> int:
        """Return how many of `rows` make at most so many batches."""
        low, high = 1, len(rows)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._groups(rows[:middle])) <= batches:
                low = middle
            else:
                high = middle - 1
        return low

    def _left_of_stage(self) -> int | None:
        following = self._stages[self._stage + 1 :]
        return following[0].first - self.micro_batch if following else None

    def _samples(self) -> list[int]:
        return list(self._drawn)

    def _count(self, slots: list[Slot], placed: int) -> None:
        super()._count(slots, placed)
        for slot in slots:
            self._drawn[slot.source] += 1

    def state(self) -> dict[str, Any]:
        """Return where the stream stands: the beginning of the window, and how far in it."""
        cursors = self._before_window if self._ready else [cursor.state() for cursor in self._cursors]
        window = self._first if self._ready else self.micro_batch
        return {**super().state(), "cursors": cursors, "window": window}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state: the window is drawn again, and what was taken of it is passed over."""
        super().restore(state)
        self._drawn = list(state["samples"])
        self._ready = []
        done = self.micro_batch - state["window"]
        if done:
            self.micro_batch = state["window"]
            self._fill()
            del self._ready[-done:]
            self.micro_batch += done
