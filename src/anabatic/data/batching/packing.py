"""The packed batch, and how pieces of documents are collated into it: flat with a padded tail, or rows padded to one
length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from anabatic.data.vision.picture_tensors import PictureBatch

SegmentOrigin = tuple[int, int, int, int, int]
"""A piece of the data: number of its source, of the entry in it, of the pass over it, first input, inputs."""

IGNORE_INDEX = -100
"""Label of a token that is not learned (the value torch's cross_entropy ignores by default)."""


@dataclass
class Batch:
    """A packed micro-batch of `T` tokens in `n` segments that do not see each other.

    Attributes:
        input_ids: int64 `[T]`.
        labels: int64 `[T]`, the token that follows each input token, already shifted; `IGNORE_INDEX` where nothing is
            learned. The label of a segment's last token is the true next token of its document where there is one.
        position_ids: int64 `[T]`, from 0 in every segment.
        cu_seqlens: host list of `n + 1` segment borders, from 0 to `T` (no device sync to read it).
        num_targets: labels that are learned, counted on the host; of preference pairs, the pairs.
        num_tokens: tokens that came from the data (T less the padded tail).
        loader_state: where the loader stands after this batch, JSON-serialisable.
        extra: what else the data say of each segment, by name; first axis: segments that are no padding.
        segment_origins: the pieces, in order.
        row_tokens: of rows padded to one length, the tokens of each that came from the data; empty: the tail alone is
            padded.
        picture_names: of each piece, the pictures in it as `TokenSegment` has them; empty: none has any.
        pictures: what the tokens of pictures stand for; None: there are none.
        row_inputs: of each piece, what the model's own processor makes of it, empty for text alone; empty: no piece has
            pictures, or the model packs them.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: list[int]
    num_targets: int
    num_tokens: int
    loader_state: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    segment_origins: list[SegmentOrigin] = field(default_factory=list)
    row_tokens: list[int] = field(default_factory=list)
    picture_names: list[bytes] = field(default_factory=list)
    pictures: PictureBatch | None = None
    row_inputs: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def make_token_mask(self) -> torch.Tensor | None:
        """Return fp32 `[T]`, 1 for tokens that came from the data, 0 for padding; None: nothing is padded."""
        total = self.input_ids.numel()
        if self.num_tokens == total:
            return None
        if not self.row_tokens:
            return (torch.arange(total) < self.num_tokens).float()
        columns = torch.arange(total // len(self.row_tokens))
        return (columns < torch.tensor(self.row_tokens)[:, None]).float().flatten()

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; copies from pinned memory do not block."""
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.cu_seqlens,
            self.num_targets,
            self.num_tokens,
            self.loader_state,
            {name: value.to(device, non_blocking=True) for name, value in self.extra.items()},
            self.segment_origins,
            self.row_tokens,
            self.picture_names,
            self.pictures,
            self.row_inputs,
        )


@dataclass(frozen=True)
class TokenSegment:
    """A run of consecutive tokens that attend to one another.

    Attributes:
        ids: `n + 1` token ids: `n` inputs and the token that follows the last one.
        loss_mask: `n + 1` values, 1 where the token is a target; `None`: all are.
        pictures: the pictures in it, as `data.vision.picture_encoder.pack_grids` writes them; empty: none.
    """

    ids: np.ndarray
    loss_mask: np.ndarray | None = None
    pictures: bytes = field(default=b"", kw_only=True)

    @property
    def num_inputs(self) -> int:
        """Input tokens."""
        return len(self.ids) - 1


def split_into_segments(length: int, seq_len: int) -> list[tuple[int, int]]:
    """Cut `length` tokens into `(start, n)` pieces of `seq_len` tokens, the last one shorter."""
    return [(start, min(seq_len, length - start)) for start in range(0, length, seq_len)]


def choose_best_fit(lengths: Sequence[int], room: int) -> int | None:
    """Return the index of the waiting piece to place next, or `None` when none fits into `room` tokens.

    The oldest goes first; when it does not fit, the longest that fits does (best fit), so nothing waits for
    longer than one micro-batch at the head of the line.
    """
    if lengths and lengths[0] <= room:
        return 0
    best, best_length = None, 0
    for index, length in enumerate(lengths):
        if best_length < length <= room:
            best, best_length = index, length
    return best


def pack_best_fit(lengths: Iterable[int], capacity: int, lookahead: int = 64) -> Iterator[list[int]]:
    """Group pieces that may not be split into micro-batches of `capacity` tokens.

    Args:
        lengths: tokens of each piece, none more than `capacity`.
        capacity: tokens of a micro-batch.
        lookahead: pieces that wait at a time.

    Yields:
        indices of the pieces of one micro-batch; every index comes exactly once.
    """
    source = iter(enumerate(lengths))
    waiting: list[tuple[int, int]] = []
    batch: list[int] = []
    room = capacity
    while True:
        while len(waiting) < lookahead and (new := next(source, None)) is not None:
            waiting.append(new)
        at = choose_best_fit([length for _, length in waiting], room)
        if at is None:
            if batch:
                yield batch
            if not waiting:
                return
            batch, room = [], capacity
            continue
        index, length = waiting.pop(at)
        batch.append(index)
        room -= length


def collate_padded(
    pieces: Sequence[TokenSegment], capacity: int, pad_id: int, seq_len: int, state: dict[str, Any] | None = None
) -> Batch:
    """Lay pieces below each other, each padded with `pad_id` to the longest; `T` is rows x longest.

    Every row is one segment. Its padding has no labels, and under the causal mask no token before it sees it.

    Args:
        pieces: at least one.
        capacity, seq_len: as for `collate_packed`; whoever chose the pieces has kept to them.
        pad_id: token of the padding.
        state: stored in the batch.
    """
    longest = max(piece.num_inputs for piece in pieces)
    input_ids = np.full((len(pieces), longest), pad_id, dtype=np.int64)
    labels = np.full((len(pieces), longest), IGNORE_INDEX, dtype=np.int64)
    for row, piece in enumerate(pieces):
        input_ids[row, : piece.num_inputs] = piece.ids[:-1]
        learned = slice(None) if piece.loss_mask is None else piece.loss_mask[1:] != 0
        labels[row, : piece.num_inputs][learned] = piece.ids[1:][learned]
    return Batch(
        input_ids=torch.from_numpy(input_ids.reshape(-1)),
        labels=torch.from_numpy(labels.reshape(-1)),
        position_ids=torch.arange(longest).repeat(len(pieces)),
        cu_seqlens=[row * longest for row in range(len(pieces) + 1)],
        num_targets=int(np.count_nonzero(labels != IGNORE_INDEX)),
        num_tokens=sum(piece.num_inputs for piece in pieces),
        loader_state=state or {},
        row_tokens=[piece.num_inputs for piece in pieces],
    )


def collate_packed(
    pieces: Sequence[TokenSegment], capacity: int, pad_id: int, seq_len: int, state: dict[str, Any] | None = None
) -> Batch:
    """Lay pieces side by side in one batch of exactly `capacity` tokens.

    The unused tail is filled with `pad_id` in segments of its own, at most `seq_len` long, whose labels are
    ignored.

    Args:
        pieces: together at most `capacity` tokens.
        capacity: `T`, the tokens of the batch.
        pad_id: token of the tail.
        seq_len: longest segment.
        state: stored in the batch.
    """
    input_ids = np.full(capacity, pad_id, dtype=np.int64)
    labels = np.full(capacity, IGNORE_INDEX, dtype=np.int64)
    borders = [0]
    num_targets = 0
    for piece in pieces:
        start, stop = borders[-1], borders[-1] + piece.num_inputs
        input_ids[start:stop] = piece.ids[:-1]
        if piece.loss_mask is None:
            labels[start:stop] = piece.ids[1:]
            num_targets += piece.num_inputs
        else:
            learned = piece.loss_mask[1:] != 0
            labels[start:stop][learned] = piece.ids[1:][learned]
            num_targets += int(np.count_nonzero(learned))
        borders.append(stop)
    num_tokens = borders[-1]
    borders.extend(num_tokens + start + n for start, n in split_into_segments(capacity - num_tokens, seq_len))
    starts = np.repeat(np.asarray(borders[:-1], dtype=np.int64), np.diff(borders))
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(np.arange(capacity, dtype=np.int64) - starts),
        cu_seqlens=borders,
        num_targets=num_targets,
        num_tokens=num_tokens,
        loader_state=state or {},
        picture_names=[piece.pictures for piece in pieces] if any(piece.pictures for piece in pieces) else [],
    )


CollateFn = Callable[[Sequence[TokenSegment], int, int, int, "dict[str, Any] | None"], Batch]
"""`collate_packed`, or what takes its place."""
