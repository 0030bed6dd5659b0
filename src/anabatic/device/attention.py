"""Attention over packed segments in plain torch: causal or bidirectional, with window, softcap and sinks where models
have them.

Shapes: `T` tokens, `R` segments of a group, `N` query heads, `K` key/value heads (N a multiple of K), `D` head size of
queries and keys, `E` head size of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.device.device import send_to_device


class AttentionOptions(NamedTuple):
    """Options of a layer's attention scores."""

    scale: float
    """Factor on the scores."""
    window: int | None = None
    """A query attends to this many positions, including its own (Mistral, arXiv 2310.06825); without a causal mask, to
    as many after it; None: all."""
    softcap: float | None = None
    """`cap * tanh(score / cap)` (Gemma 2, arXiv 2408.00118, section 2)."""
    sinks: Tensor | None = None
    """One learned score per query head, `[N]`, that takes part in the softmax and has no value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """True for a plain softmax, which fused kernels support."""
        return self.softcap is None and self.sinks is None


Attention: TypeAlias = "Callable[[Tensor, Tensor, Tensor, PackedSegments, AttentionOptions], Tensor]"
"""`[T, N, D]`, `[T, K, D]`, `[T, K, E]`, segments, options -> `[T, N, E]`."""


class Exchange(Protocol):
    """What attention does where the tokens of a batch are split over ranks (`parallel/context_exchange.py`, where the
    shapes are).

    Attributes:
        gathers_heads: it is a `HeadGathering`.
        rank, ranks: number of this rank, and how many there are.
    """

    gathers_heads: bool
    rank: int
    ranks: int

    def count_own(self, cu_seqlens: Sequence[int]) -> list[tuple[int, int]]:
        """Return length and number of tokens of each run of a segment on this rank, in the order of its tokens."""

    def attend(
        self,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: PackedSegments,
        options: AttentionOptions,
    ) -> Tensor:
        """Return attention of this rank's tokens; `attention`: of tokens that are all here."""

    def gather_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's share of the heads of all tokens, in the order of the batch."""

    def scatter_heads(self, x: Tensor) -> Tensor:
        """Take back what `gather_heads` has given."""


class HeadGathering(Exchange, Protocol):
    """An exchange that gives each rank all tokens of some heads (`gathers_heads`)."""

    def gather(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first exchange."""

    def scatter(self, out: Tensor) -> Tensor:
        """The second exchange."""

    def gather_gradient(self, grad: Tensor) -> Tensor:
        """Gradient of `scatter`."""

    def scatter_gradients(self, joint: Tensor, d_v: Tensor, key_heads: int) -> tuple[Tensor, Tensor]:
        """Gradient of `gather`."""


def get_head_exchange(segments: PackedSegments) -> HeadGathering | None:
    """Return the exchange of a plan for layers that call attention's kernel themselves; None: all tokens are here."""
    assert segments.exchange is None or segments.exchange.gathers_heads
    return cast("HeadGathering | None", segments.exchange)


def attention_reference(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, options: AttentionOptions) -> Tensor:
    """Compute attention inside each segment: causal, bidirectional or along the paths of a tree. Segments of similar
    length share one call, so there is little padding.

    Right padding needs no mask under a causal mask: no valid query attends to a later key.

    Args:
        q: `[T, N, D]`; k: `[T, K, D]`; v: `[T, K, E]`.
        segments: borders of the segments.

    Returns:
        `[T, N, E]`.
    """
    sizes = [rows * length for _, rows, length in segments.groups]
    # One split: slicing would sum one gradient of all tokens, mostly zeros, per slice.
    parts = zip(*(segments.spread_groups(x).split(sizes) for x in (q, k, v)), strict=True)
    outputs = []
    for index, ((_, rows, length), tensors) in enumerate(zip(segments.groups, parts, strict=True)):
        group_q, group_k, group_v = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in tensors)
        if isinstance(segments, PackedTrees):
            out = attend_masked(group_q, group_k, group_v, segments.build_mask(index, options.window), options)
        else:
            out = (
                _attend_causal(group_q, group_k, group_v, options)
                if segments.is_causal
                else _attend_bidirectional(group_q, group_k, group_v, segments.valid_keys[index], options)
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return segments.gather_packed(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def attend_in_fp32(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, options: AttentionOptions) -> Tensor:
    """`attention_reference` in fp32 whatever the inputs: on a processor torch's kernel takes three times as long for
    the gradient of bf16 (docs/dev)."""
    with torch.autocast(q.device.type, enabled=False):
        wide_q, wide_k, wide_v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
        return attention_reference(wide_q, wide_k, wide_v, segments, options).to(v.dtype)


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """q `[R, N, L, D]`, k `[R, K, L, D]`, v `[R, K, L, E]` -> `[R, N, L, E]`; with a window the cost is linear in L."""
    length, window = q.shape[2], options.window
    is_windowed = window is not None and window < length
    if options.is_plain and not is_windowed:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    width = window if is_windowed and window is not None else length
    outputs = []
    for start in range(0, length, width):
        first_key, end = max(0, start - width + 1), min(length, start + width)
        row = torch.arange(start, end, device=q.device)[:, None]
        column = torch.arange(first_key, end, device=q.device)[None, :]
        mask = (column <= row) & (column > row - width)
        outputs.append(attend_masked(q[:, :, start:end], k[:, :, first_key:end], v[:, :, first_key:end], mask, options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, valid_keys: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Like `_attend_causal`, but a query also attends to later keys, and never to padding.

    Args:
        valid_keys: bool `[R, 1, 1, L]`, keys that are not padding; None: all. Padded queries attend to valid keys, too,
            so their results are finite; they are not used.
    """
    length = q.shape[2]
    mask = valid_keys
    if options.window is not None and options.window < length:
        positions = torch.arange(length, device=q.device)
        in_window = (positions[:, None] - positions[None, :]).abs() < options.window
        is_self = positions[:, None] == positions[None, :]  # or a padded query would attend to nothing
        mask = in_window if valid_keys is None else (in_window & valid_keys) | is_self
    if mask is None and options.is_plain:
        return F.scaled_dot_product_attention(q, k, v, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1])
    if mask is None:
        mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device)
    return attend_masked(q, k, v, mask, options)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention under a mask that includes the window; every query must attend to a key.

    Args:
        q: `[R, N, L, D]`; k: `[R, K, M, D]`; v: `[R, K, M, E]`; mask: bool, broadcast to `[R, N, L, M]`.

    Returns:
        `[R, N, L, E]`.
    """
    if options.is_plain:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) if group_size > 1 else x for x in (k, v))
    logits = (q @ k.transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    logits = logits.masked_fill(~mask, float("-inf"))
    upcast = logits if logits.dtype == torch.float64 else logits.float()
    if options.sinks is not None:
        sinks = options.sinks.to(upcast.dtype)[:, None, None].expand(*upcast.shape[:-1], 1)
        upcast = torch.cat((upcast, sinks), dim=-1)
    weights = torch.softmax(upcast, dim=-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


_SLACK = 0.8
"""A segment joins a group if its length is at least this fraction of the longest: at most a fifth is padding."""
_MAX_SEGMENTS_PER_GROUP = 2
"""With at most this many segments per group on average, each segment gets its own call, and no row is moved."""
_SHORT_LENGTH = 16
"""Segments up to this length form one group: a call costs more than the padding."""


class PackedSegments:
    """Plan of one packed batch.

    Attributes:
        cu_seqlens: host list of `n + 1` borders.
        groups: `(start, rows, length)` of each group in the spread order.
        is_identity: the spread order is the packed order (all segments equally long), so no row is moved.
        num_attended_layers: layers that have used the plan; other layers may have mixed segments.
        is_causal: a token attends to itself and earlier tokens of its segment; False: to its whole segment.
        output_rows: int64, rows whose outputs alone are wanted, for a last layer that can leave out the others.
        has_dropped_rows: it has done so.
        token_mask: on the host, fp32 `[T]`, 0 for padding; None: there is none.
        exchange: of ranks that share the batch: the model runs on the tokens of one, the plan is that of all.
    """

    output_rows: Tensor | None = None
    has_dropped_rows = False
    token_mask: Tensor | None = None
    exchange: Exchange | None = None

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
        offset = 0
        for _, rows, _ in self.groups:
            self._lengths.append(lengths[order[offset : offset + rows]])
            offset += rows
        if len(lengths) <= _MAX_SEGMENTS_PER_GROUP * len(self.groups):
            self.is_identity = True
            self.groups = [(int(start), 1, int(length)) for start, length in zip(borders[:-1], lengths, strict=True)]
            self._lengths = []

    @functools.cached_property
    def valid_keys(self) -> list[Tensor | None]:
        """Return for each group the keys that are not padding, bool `[rows, 1, 1, length]`; None if all are valid.

        Needed only without a causal mask, under which no valid query attends to the padding after it.
        """
        masks: list[Tensor | None] = [None] * len(self.groups)
        for group, lengths in enumerate(self._lengths):
            longest = self.groups[group][2]
            if (lengths < longest).any():
                mask = np.arange(longest)[None, :] < lengths[:, None]
                masks[group] = send_to_device(torch.from_numpy(mask[:, None, None, :]), self._device)
        return masks

    @functools.cached_property
    def _spread_index(self) -> Tensor:
        """Copied to the device on first use: kernels that take the borders never use it."""
        return send_to_device(torch.from_numpy(self._indices[0]), self._device)

    @functools.cached_property
    def _gather_index(self) -> Tensor:
        return send_to_device(torch.from_numpy(self._indices[1]), self._device)

    def spread_groups(self, x: Tensor) -> Tensor:
        """Spread packed `[T, ...]` -> `[P, ...]`, group by group, each segment padded to its group's length."""
        if self.is_identity:
            return x
        out: Tensor = _SpreadRows.apply(x, self._spread_index, self._gather_index)  # type: ignore[no-untyped-call]
        return out

    def spread_gradient(self, grad: Tensor) -> Tensor:
        """Spread a gradient of `gather_packed`'s output: like `spread_groups`, zero for padding. Has no gradient."""
        if self.is_identity:
            return grad
        rows = self._spread_index.shape[0]
        return grad.new_zeros(rows, *grad.shape[1:]).index_copy_(0, self._gather_index, grad)

    def gather_packed(self, x: Tensor) -> Tensor:
        """Gather `[P, ...]` -> packed `[T, ...]`."""
        if self.is_identity:
            return x
        out: Tensor = GatherRows.apply(x, self._gather_index)  # type: ignore[no-untyped-call]
        return out


def _plan_groups(
    borders: np.ndarray, lengths: np.ndarray, order: np.ndarray, groups: list[tuple[int, int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Append the groups to `groups`; return the packed index of every spread row (`[P]`) and the spread row of every
    packed token (`[T]`)."""
    gather_index = np.empty(int(borders[-1]), dtype=np.int64)
    spread_index: list[np.ndarray] = []
    start = first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        min_length = longest * _SLACK if longest > _SHORT_LENGTH else 0
        last = first
        while last < len(order) and lengths[order[last]] >= min_length:
            last += 1
        members = order[first:last]
        offsets = np.minimum(np.arange(longest)[None, :], lengths[members][:, None] - 1)
        index = borders[members][:, None] + offsets
        is_valid = np.arange(longest)[None, :] < lengths[members][:, None]
        rows = start + np.arange(index.size).reshape(index.shape)
        gather_index[index[is_valid]] = rows[is_valid]
        spread_index.append(index.reshape(-1))
        groups.append((start, len(members), longest))
        start += index.size
        first = last
    return np.concatenate(spread_index), gather_index


class _SpreadRows(torch.autograd.Function):
    """Row selection whose gradient is row selection, too: padded rows have no gradient, as no valid query uses them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spread_index: Tensor, gather_index: Tensor) -> Tensor:
        ctx.save_for_backward(gather_index)
        return x.index_select(0, spread_index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gather_index,) = ctx.saved_tensors
        return grads[0].index_select(0, gather_index), None, None


class GatherRows(torch.autograd.Function):
    """Selection of distinct rows; the gradient is a copy into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather_index: Tensor) -> Tensor:
        """Return the chosen rows."""
        ctx.save_for_backward(gather_index)
        ctx.rows = x.shape[0]
        return x.index_select(0, gather_index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of all rows."""
        (gather_index,) = ctx.saved_tensors
        (grad,) = grads
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, gather_index, grad), None


class PackedTrees(PackedSegments):
    """Segments that are trees of texts with shared prefixes: every token attends to its ancestors and itself.

    The tokens of a tree are in depth-first order, so the subtree of token j is j up to, not including, `ends[j]`.

    Args:
        cu_seqlens: host list of `n + 1` borders of the trees.
        ends: int64 `[T]`, end of the subtree of each token, relative to its tree's first token.
        depths: int64 `[T]`, number of tokens before each on its path: its position.
    """

    def __init__(self, cu_seqlens: list[int], ends: np.ndarray, depths: np.ndarray, device: torch.device) -> None:
        super().__init__(cu_seqlens, device)
        order = np.arange(len(ends)) if self.is_identity else self._indices[0]
        self._ends = send_to_device(torch.from_numpy(ends[order]), device)
        self._depths = send_to_device(torch.from_numpy(depths[order]), device)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def build_mask(self, group: int, window: int | None) -> Tensor:
        """Return the attention mask of a group, bool `[rows, 1, length, length]`; padded queries attend to themselves.

        Args:
            window: a token attends to this many tokens of its path, including itself; None: all.
        """
        if (group, window) not in self._masks:
            start, rows, length = self.groups[group]
            ends, depths = (x[start : start + rows * length].view(rows, length) for x in (self._ends, self._depths))
            positions = torch.arange(length, device=ends.device)
            visible = (positions[None, :] <= positions[:, None]) & (positions[:, None] < ends[:, None, :])
            if window is not None:
                visible &= depths[:, :, None] - depths[:, None, :] < window
            self._masks[group, window] = (visible | (positions[:, None] == positions[None, :]))[:, None]
        return self._masks[group, window]
