"""Where the segments of a packed batch lie, and how segments of like length are put side by side.

Built on the host from the host list of borders: no kernel has to wait for it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabatic.device.transfer import send_to_device

_SLACK = 0.8
"""A segment joins a group when it is at least this share of the group's longest: at most a fifth is padding."""
_MAX_SEGMENTS_PER_GROUP = 2
"""With at most so many segments for each group, each gets a call of its own, and nothing is moved."""
_SHORT_LENGTH = 16
"""Segments up to this length form one group: a call costs more than their padding."""


class PackedSegments:
    """The plan of one packed batch.

    Attributes:
        cu_seqlens: host list of `n + 1` borders.
        groups: `(start, rows, length)` of each group in the spread order.
        is_identity: the spread order is the packed order (all segments equally long), so nothing is moved.
        num_attended_layers: layers that have used the plan; a layer that has not may have mixed segments.
        is_causal: a token sees itself and what comes before it in its segment; False: its whole segment.
    """

    def __init__(self, cu_seqlens: list[int], device: torch.device, causal: bool = True) -> None:
        self.cu_seqlens, self.is_causal = cu_seqlens, causal
        self.num_attended_layers = 0
        self._lengths: list[np.ndarray] = []
        borders = np.asarray(cu_seqlens, dtype=np.int64)
        lengths = np.diff(borders)
        order = np.argsort(-lengths, kind="stable")
        self.groups: list[tuple[int, int, int]] = []
        self.is_identity = bool((lengths == lengths[0]).all())
        if self.is_identity:
            self.groups.append((0, len(lengths), int(lengths[0])))
            return
        self._indices, self._device = _plan_groups(borders, lengths, order, self.groups), device
        first = 0
        for _, rows, _ in self.groups:
            self._lengths.append(lengths[order[first : first + rows]])
            first += rows
        if len(lengths) <= _MAX_SEGMENTS_PER_GROUP * len(self.groups):
            self.is_identity = True
            self.groups = [(int(start), 1, int(length)) for start, length in zip(borders[:-1], lengths, strict=True)]
            self._lengths = []

    @functools.cached_property
    def valid_keys(self) -> list[Tensor | None]:
        """For each group which keys are no padding, bool `[rows, 1, 1, length]`; None where all are.

        Needed without a causal mask alone: under one no real query sees the padding, which comes after it.
        """
        found: list[Tensor | None] = [None] * len(self.groups)
        for number, lengths in enumerate(self._lengths):
            longest = self.groups[number][2]
            if (lengths < longest).any():
                mask = np.arange(longest)[None, :] < lengths[:, None]
                found[number] = send_to_device(torch.from_numpy(mask[:, None, None, :]), self._device)
        return found

    @functools.cached_property
    def _spread_index(self) -> Tensor:
        """Copied when it is first asked for: kernels that take the borders never ask."""
        return send_to_device(torch.from_numpy(self._indices[0]), self._device)

    @functools.cached_property
    def _gather_index(self) -> Tensor:
        return send_to_device(torch.from_numpy(self._indices[1]), self._device)

    def spread_groups(self, x: Tensor) -> Tensor:
        """Packed `[T, ...]` -> `[P, ...]`, group after group, each segment padded to its group's length."""
        if self.is_identity:
            return x
        out: Tensor = _SpreadRows.apply(x, self._spread_index, self._gather_index)  # type: ignore[no-untyped-call]
        return out

    def gather_packed(self, x: Tensor) -> Tensor:
        """`[P, ...]` -> packed `[T, ...]`."""
        if self.is_identity:
            return x
        out: Tensor = _GatherRows.apply(x, self._gather_index)  # type: ignore[no-untyped-call]
        return out


def _plan_groups(
    borders: np.ndarray, lengths: np.ndarray, order: np.ndarray, groups: list[tuple[int, int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the packed index of every spread row (`[P]`) and the spread row of every packed token (`[T]`)."""
    back = np.empty(int(borders[-1]), dtype=np.int64)
    spread: list[np.ndarray] = []
    start = first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        floor = longest * _SLACK if longest > _SHORT_LENGTH else 0
        last = first
        while last < len(order) and lengths[order[last]] >= floor:
            last += 1
        members = order[first:last]
        offsets = np.minimum(np.arange(longest)[None, :], lengths[members][:, None] - 1)
        index = borders[members][:, None] + offsets
        real = np.arange(longest)[None, :] < lengths[members][:, None]
        rows = start + np.arange(index.size).reshape(index.shape)
        back[index[real]] = rows[real]
        spread.append(index.reshape(-1))
        groups.append((start, len(members), longest))
        start += index.size
        first = last
    return np.concatenate(spread), back


class _SpreadRows(torch.autograd.Function):
    """Row selection whose gradient is row selection too: padded rows have no gradient, no real query sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, spread)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class _GatherRows(torch.autograd.Function):
    """Selection of distinct rows; the gradient is a plain copy into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.rows = x.shape[0]
        return x.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        (grad,) = grads
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, back, grad), None


class PackedTrees(PackedSegments):
    """Segments in which texts with equal beginnings share them: every token sees its ancestors and itself.

    The tokens of a tree lie in depth-first order, so those below token j are j up to, not including, `ends[j]`.

    Args:
        cu_seqlens: host list of `n + 1` borders of the trees.
        ends: int64 `[T]`, where the tokens below each token end, counted from its tree's first token.
        depths: int64 `[T]`, how many tokens come before each on its path: its position.
    """

    def __init__(self, cu_seqlens: list[int], ends: np.ndarray, depths: np.ndarray, device: torch.device) -> None:
        super().__init__(cu_seqlens, device)
        order = np.arange(len(ends)) if self.is_identity else self._indices[0]
        self._ends = send_to_device(torch.from_numpy(ends[order]), device)
        self._depths = send_to_device(torch.from_numpy(depths[order]), device)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def build_mask(self, number: int, window: int | None) -> Tensor:
        """Return who sees whom in a group, bool `[rows, 1, length, length]`; of padding every query sees something.

        Args:
            window: a token sees this many tokens of its path, itself included; None: all.
        """
        if (number, window) not in self._masks:
            start, rows, length = self.groups[number]
            ends, depths = (x[start : start + rows * length].view(rows, length) for x in (self._ends, self._depths))
            place = torch.arange(length, device=ends.device)
            seen = (place[None, :] <= place[:, None]) & (place[:, None] < ends[:, None, :])
            if window is not None:
                seen &= depths[:, :, None] - depths[:, None, :] < window
            self._masks[number, window] = (seen | (place[:, None] == place[None, :]))[:, None]
        return self._masks[number, window]
