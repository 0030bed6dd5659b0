"""Sequences of word ids held in memory, each with a class and numbers; random crops of them in every pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabatic.data.batching.packing import IGNORE_INDEX, Batch, TokenSegment, collate_packed
from anabatic.data.batching.shuffle import splitmix64_hash
from anabatic.data.shards.reader import EntryLocation


@dataclass(frozen=True)
class RandomCrop:
    """Chooses a run of points.

    Attributes:
        point_start_mask: bool `[V]`, words that begin a point.
        min_fraction: share of the points that is read at least.
        seed: of the draw.
    """

    point_start_mask: np.ndarray
    min_fraction: float
    seed: int

    def __call__(self, ids: np.ndarray, number: int, turn: int) -> tuple[int, int]:
        """Return the first word of the run and how many they are; the same for the same sequence and pass."""
        random = np.random.Generator(np.random.SFC64(splitmix64_hash(self.seed, number, turn)))
        borders = np.append(np.flatnonzero(self.point_start_mask[ids]), len(ids))
        points = len(borders) - 1
        if points < 2:
            return 0, len(ids)
        count = int(random.integers(max(1, round(self.min_fraction * points)), points + 1))
        first = int(random.integers(0, points - count + 1))
        return int(borders[first]), int(borders[first + count] - borders[first])


TargetSampler = Callable[[np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]
"""`draw(ids, number, turn)` returns what the model reads of a sequence in an epoch, and the target of every
position (`IGNORE_INDEX`: none), both as long as `ids`."""


@dataclass(frozen=True)
class SequenceSegment(TokenSegment):
    """One sequence as it enters a batch.

    Attributes:
        ids: `n` inputs (a `TokenSegment` of text has the token behind them, too).
        targets: `n` ids, `IGNORE_INDEX` where nothing is learned; None: only the class is.
        label: class, `IGNORE_INDEX` without one.
        sequence_index: of the sequence in its set.
        features: numbers beside the words, fp32 `[F]`.
        weight: how much it counts, 1 on average.
    """

    targets: np.ndarray | None = None
    label: int = IGNORE_INDEX
    sequence_index: int = 0
    features: np.ndarray | None = None
    weight: float | None = None

    @property
    def num_inputs(self) -> int:
        """Input tokens."""
        return len(self.ids)


class SequenceDataset:
    """Sequences, as `Loader` and `ValidationBatches` read a source.

    Args:
        name: for messages.
        ids: of each sequence, none empty.
        labels: class of each; `IGNORE_INDEX` without one.
        features: fp32 `[n, F]`, or None.
        pad: id that fills the tail of a batch.
        draw: what is read and what is learned; None: all is read, and the class is learned.
        weights: how much each counts, 1 on average; None: all count equally.
        crop: which run of a sequence is read in a pass; None: all of it.

    Attributes:
        num_tokens: of one pass, as it is read.
    """

    is_chat = True
    """Sequences are rows: they are packed whole."""

    def __init__(
        self,
        name: str,
        ids: Sequence[np.ndarray],
        labels: Sequence[int],
        features: np.ndarray | None = None,
        pad: int = 0,
        draw: TargetSampler | None = None,
        weights: np.ndarray | None = None,
        crop: RandomCrop | None = None,
    ) -> None:
        self.name, self.eot, self.target_sampler, self.crop = name, pad, draw, crop
        self.num_docs = len(ids)
        self._lengths = np.asarray([len(one) for one in ids], dtype=np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self._lengths)))
        self._ids = np.concatenate([*ids, np.empty(0, np.int32)]).astype(np.int32)
        self._labels = np.asarray(labels, dtype=np.int64)
        self._features, self._weights = features, weights
        self.counts: dict[str, int] = {"rows": self.num_docs}
        longest = int(self._lengths.max()) if self.num_docs else 0
        self.meta: dict[str, Any] = {"seq_len": longest, "shards": [{"docs": self.num_docs}], "counts": self.counts}
        content = (self._ids, self._offsets, self._labels, np.empty(0) if features is None else features)
        self.num_tokens = sum(self.locate_entry(number).num_inputs for number in range(self.num_docs))
        self.key = hashlib.sha256(b"".join(part.tobytes() for part in content)).hexdigest()

    @property
    def class_labels(self) -> np.ndarray:
        """Classes, int64 `[n]`."""
        return self._labels

    @property
    def feature_tensor(self) -> Tensor | None:
        """Numbers beside the words, fp32 `[n, F]`."""
        return None if self._features is None else torch.from_numpy(self._features)

    def locate_entry(self, i: int, turn: int = 0) -> EntryLocation:
        """Return where that of sequence `i` lies which is read in a pass; the shard is its number."""
        start, length = int(self._offsets[i]), int(self._lengths[i])
        if self.crop is None:
            return EntryLocation(i, start, length, turn)
        first, count = self.crop(self._ids[start : start + length], i, turn)
        return EntryLocation(i, start + first, count, turn)

    def read_entry_lengths(self, shard: int) -> np.ndarray:
        """Return the inputs of every sequence, int64."""
        return self._lengths

    def count_entry_bytes(self, i: int) -> int:
        """Return 0: words have no bytes that a loss could be measured by."""
        return 0

    def read_segment(self, entry: EntryLocation, start: int, n: int) -> SequenceSegment:
        """Return a sequence as it is read in pass `locate_entry.turn`."""
        number = entry.shard
        ids = self._ids[entry.offset + start : entry.offset + start + n]
        features = None if self._features is None else self._features[number]
        read, targets = (ids, None) if self.target_sampler is None else self.target_sampler(ids, number, entry.epoch)
        weight = None if self._weights is None else float(self._weights[number])
        return SequenceSegment(read, None, targets, int(self._labels[number]), number, features, weight)


def collate_classification(
    pieces: Sequence[TokenSegment], capacity: int, pad_id: int, seq_len: int, state: dict[str, Any] | None = None
) -> Batch:
    """Lay sequences side by side; the label of a sequence's last token is its class, nothing else has one.

    `extra` has `number` int64 `[n]`, and `features` fp32 `[n, F]` and `weight` fp32 `[n]` where the set has them.
    Arguments as for `collate_packed`.
    """
    samples = _require_sequence_segments(pieces)
    batch = _collate_without_labels(samples, capacity, pad_id, seq_len, state)
    for piece, stop in zip(samples, batch.cu_seqlens[1:], strict=False):
        batch.labels[stop - 1] = piece.label
    batch.num_targets = sum(piece.label != IGNORE_INDEX for piece in samples)
    return batch


def collate_word_targets(
    pieces: Sequence[TokenSegment], capacity: int, pad_id: int, seq_len: int, state: dict[str, Any] | None = None
) -> Batch:
    """Lay sequences side by side with the targets that were drawn for them. Arguments as for `collate_packed`."""
    samples = _require_sequence_segments(pieces)
    batch = _collate_without_labels(samples, capacity, pad_id, seq_len, state)
    for piece, start in zip(samples, batch.cu_seqlens, strict=False):
        assert piece.targets is not None
        batch.labels[start : start + piece.num_inputs] = torch.from_numpy(piece.targets.astype(np.int64))
        batch.num_targets += int(np.count_nonzero(piece.targets != IGNORE_INDEX))
    return batch


def _require_sequence_segments(pieces: Sequence[TokenSegment]) -> list[SequenceSegment]:
    """The pieces of `SequenceDataset`, as what they are."""
    found = [piece for piece in pieces if isinstance(piece, SequenceSegment)]
    assert len(found) == len(pieces)
    return found


def _collate_without_labels(
    pieces: Sequence[SequenceSegment], capacity: int, pad_id: int, seq_len: int, state: dict[str, Any] | None
) -> Batch:
    """The sequences without any label."""
    nothing = [TokenSegment(np.append(piece.ids, pad_id), np.zeros(piece.num_inputs + 1, np.uint8)) for piece in pieces]
    batch = collate_packed(nothing, capacity, pad_id, seq_len, state)
    batch.extra["number"] = torch.tensor([piece.sequence_index for piece in pieces], dtype=torch.int64)
    if pieces and pieces[0].features is not None:
        batch.extra["features"] = torch.from_numpy(np.stack([piece.features for piece in pieces]))  # type: ignore[misc]
    if pieces and pieces[0].weight is not None:
        batch.extra["weight"] = torch.tensor([piece.weight for piece in pieces])
    return batch
