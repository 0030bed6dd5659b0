"""Padded micro-batches, for comparison with packed ones: rows of like length, each padded to the longest.

Rows are drawn as for packing, a window of them at a time; a window is sorted by length, cut into batches, and the
batches are shuffled. Every row of a source comes once per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anabatic.core.errors import ConfigError
from anabatic.data.batching.mixture import MicroBatchStream, MixtureStage, PlannedSegment
from anabatic.data.batching.shuffle import permute_indices, splitmix64_hash
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.data.shards.reader import ShardSet, ShardSubset

WINDOW_BATCHES = 64
"""Full micro-batches that the rows of a window would make without padding."""


def group_by_length(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Return the indices of the rows of each batch, longest rows first.

    A batch takes rows in order of length for as long as `rows x longest` is at most `capacity`.
    """
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        stop = start + max(1, capacity // int(lengths[order[start]]))
        batches.append(order[start:stop])
        start = stop
    return batches


def estimate_epoch_batches(
    sets: Sequence[ShardSet | ShardSubset | SequenceDataset], seq_len: int, capacity: int, seed: int
) -> tuple[int, float]:
    """Return the micro-batches of one pass over all conversations, and the share of padding in them.

    Of several windows another order makes slightly other numbers; one window has none but these.
    """
    lengths = np.minimum(
        np.concatenate([each.read_entry_lengths(n) for each in sets for n in range(_count_shards(each))]), seq_len
    )
    lengths = lengths[permute_indices(np.arange(len(lengths)), len(lengths), splitmix64_hash(seed))]
    window = (np.cumsum(lengths) - lengths) // (WINDOW_BATCHES * capacity)
    batches = placed = 0
    for rows in np.split(lengths, np.flatnonzero(np.diff(window)) + 1):
        made = group_by_length(rows, capacity)
        batches += len(made)
        placed += sum(len(one) * int(rows[one[0]]) for one in made)
    return batches, 1.0 - float(lengths.sum()) / placed


def _count_shards(one: ShardSet | ShardSubset | SequenceDataset) -> int:
    return len(one.meta["shards"])


def require_rows(sets: Sequence[ShardSet | ShardSubset | SequenceDataset]) -> None:
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


class PaddedMicroBatchStream(MicroBatchStream):
    """As `MicroBatchStream`, with every micro-batch as rows x longest of at most `capacity` tokens.

    A stage of a curriculum begins with its own window: the one before is as short as it must be.

    Raises:
        ConfigError: a source is plain text.
    """

    def __init__(
        self,
        sources: Sequence[tuple[ShardSet | ShardSubset | SequenceDataset, float]],
        *,
        seq_len: int,
        capacity: int,
        seed: int,
        stages: Sequence[MixtureStage] = (),
    ) -> None:
        require_rows([shards for shards, _ in sources])
        super().__init__(sources, seq_len=seq_len, capacity=capacity, seed=seed, lookahead=1, stages=stages)
        sizes = [shards.num_docs for shards, _ in sources]
        self._largest_cursor, self._largest_num_rows = self._cursors[int(np.argmax(sizes))], max(sizes)
        self._seed = seed
        self._window_start = 0
        self._cursors_before_window: list[dict[str, Any]] = []
        self._ready_batches: list[list[PlannedSegment]] = []
        self._rows_drawn = [0] * len(sources)

    def plan_micro_batch(self) -> list[PlannedSegment]:
        """Return the rows of the next micro-batch."""
        if not self._ready_batches:
            self._fill_window()
        slots = self._ready_batches.pop()
        self.micro_batch += 1
        self._count_tokens(slots, len(slots) * max(slot.num_inputs for slot in slots))
        return slots

    def _fill_window(self) -> None:
        self._enter_stage()
        self._window_start = self.micro_batch
        self._cursors_before_window = [cursor.state_dict() for cursor in self._cursors]
        rows = self._draw_rows(None)
        left = self._batches_left_in_stage()
        if left is not None and len(self._group_rows(rows)) > left:
            for cursor, position in zip(self._cursors, self._cursors_before_window, strict=True):
                cursor.load_state_dict(position)
            rows = self._draw_rows(self._max_rows_for_batches(rows, left))
        batches = self._group_rows(rows)
        shuffled = permute_indices(
            np.arange(len(batches)), len(batches), splitmix64_hash(self._seed, self._window_start, 1)
        )
        self._ready_batches = [[rows[row] for row in batches[number]] for number in shuffled]

    def _group_rows(self, rows: list[PlannedSegment]) -> list[np.ndarray]:
        return group_by_length(np.asarray([slot.num_inputs for slot in rows], dtype=np.int64), self._capacity)

    def _draw_rows(self, count: int | None) -> list[PlannedSegment]:
        """Draw `count` rows, or a window: so many tokens, or to the end of the pass over the largest source."""
        rows: list[PlannedSegment] = []
        tokens = 0
        while len(rows) < count if count is not None else tokens < WINDOW_BATCHES * self._capacity:
            slot = self._take_most_behind(self._capacity)
            assert slot is not None  # no row is longer than a micro-batch
            rows.append(slot)
            tokens += slot.num_inputs
            if (
                count is None
                and slot.source == self._largest_cursor.source_index
                and self._largest_cursor.samples_drawn % self._largest_num_rows == 0
            ):
                break
        return rows

    def _max_rows_for_batches(self, rows: list[PlannedSegment], batches: int) -> int:
        """Return how many of `rows` make at most so many batches."""
        low, high = 1, len(rows)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self._group_rows(rows[:middle])) <= batches:
                low = middle
            else:
                high = middle - 1
        return low

    def _batches_left_in_stage(self) -> int | None:
        following = self._stages[self._stage_index + 1 :]
        return following[0].first_micro_batch - self.micro_batch if following else None

    def _samples_drawn(self) -> list[int]:
        return list(self._rows_drawn)

    def _count_tokens(self, slots: list[PlannedSegment], placed: int) -> None:
        super()._count_tokens(slots, placed)
        for slot in slots:
            self._rows_drawn[slot.source] += 1

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands: the beginning of the window, and how far in it."""
        cursors = (
            self._cursors_before_window if self._ready_batches else [cursor.state_dict() for cursor in self._cursors]
        )
        window = self._window_start if self._ready_batches else self.micro_batch
        return {**super().state_dict(), "cursors": cursors, "window": window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state: the window is drawn again, and what was taken of it is skipped."""
        super().load_state_dict(state)
        self._rows_drawn = list(state["samples"])
        self._ready_batches = []
        done = self.micro_batch - state["window"]
        if done:
            self.micro_batch = state["window"]
            self._fill_window()
            del self._ready_batches[-done:]
            self.micro_batch += done
