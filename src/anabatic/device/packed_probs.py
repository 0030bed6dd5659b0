"""Causal attention of packed segments on a processor, forward and gradient as plain functions on `[T, heads, D]`, fp32.

Short segments are batched products whose probabilities are kept: half the time of torch's kernel, which computes the
scores again for the gradient (docs/dev). Long ones go to that kernel, since probabilities grow with the square.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack

import torch
from torch import Tensor

from anabatic.device.attention import PackedSegments

LONGEST_KEPT = 256
"""Length up to which probabilities are kept: at most this many for each token and head."""
_SHORTEST_HALVED = 192
"""Length from which the queries are two blocks: the first one needs no later key."""
_ops = torch.ops.aten


def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the attention `[T, N, D]`, and what `attend_backward` needs.

    Args:
        q: `[T, N, D]`; k, v: `[T, K, D]`.
        segments: causal ones.
    """
    q, k, v = _spread(q, k, v, segments)
    out, kept = torch.empty(q.shape), list[Tensor]()
    for start, rows, length in segments.groups:
        of_q, of_k, of_v = (_heads_first(x, start, rows, length) for x in (q, k, v))
        with _Place(out, start, rows, length) as place:
            if length <= LONGEST_KEPT:
                _attend_kept(of_q, of_k, of_v, scale, kept, place)
                continue
            found = _ops._scaled_dot_product_flash_attention_for_cpu(
                *(x.unsqueeze(0) for x in (of_q, of_k, of_v)), 0.0, True, scale=scale
            )
            place.copy_(found[0][0])
            kept += found
    return segments.gather_packed(out), kept


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scale: float, kept: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys, `[T, N + K, D]`, and of values, `[T, K, D]`.

    Args:
        grad: `[T, N, D]`; kept: from `attend_forward` with the same arguments.
    """
    kv_heads = k.shape[1]
    q, k, v = _spread(q, k, v, segments)
    grad = segments.spread_gradient(grad)
    rest = iter(kept)
    totals = [torch.empty(q.shape) for _ in range(3)]
    for start, rows, length in segments.groups:
        parts = [_heads_first(x, start, rows, length) for x in (grad, q, k, v)]
        with ExitStack() as stack:
            places = [stack.enter_context(_Place(total, start, rows, length)) for total in totals]
            if length <= LONGEST_KEPT:
                _attend_kept_backward(parts, scale, [next(rest) for _ in _blocks(length)], places)
                continue
            of_grad, *of_qkv = (x.unsqueeze(0) for x in parts)
            found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
                of_grad, *of_qkv, next(rest), next(rest), 0.0, True, scale=scale
            )
            for place, part in zip(places, found, strict=True):
                place.copy_(part[0])
    d_q, d_k, d_v = (segments.gather_packed(x) for x in totals)
    return torch.cat((d_q, _add_shared(d_k, kv_heads)), 1), _add_shared(d_v, kv_heads)


def _spread(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments) -> tuple[Tensor, Tensor, Tensor]:
    """In the order of the groups, with a key and a value head for every query head."""
    share = q.shape[1] // k.shape[1]
    return segments.spread_groups(q), *(_repeat(segments.spread_groups(x), share) for x in (k, v))


def _repeat(x: Tensor, share: int) -> Tensor:
    """`[T, K, D]` -> `[T, K * share, D]`; torch's repeat_interleave takes ten times as long."""
    return x if share == 1 else x.unsqueeze(2).expand(-1, -1, share, -1).flatten(1, 2)


def _add_shared(x: Tensor, kv_heads: int) -> Tensor:
    """The transposed map; a sum over a small inner axis is slow."""
    first, *others = x.unflatten(1, (kv_heads, -1)).unbind(2)
    for other in others:
        first = first + other
    return first


def _heads_first(x: Tensor, start: int, rows: int, length: int) -> Tensor:
    """`[rows * N, length, D]` of a group; a view of a single segment."""
    part = x[start : start + rows * length]
    return part.transpose(0, 1) if rows == 1 else part.unflatten(0, (rows, length)).transpose(1, 2).flatten(0, 1)


class _Place:
    """Where a group's result goes, heads first: rows of `[T, N, D]` themselves, or a copy of theirs written back."""

    def __init__(self, total: Tensor, start: int, rows: int, length: int) -> None:
        self.rows = total[start : start + rows * length].unflatten(0, (rows, length)).transpose(1, 2)
        self.is_view = rows == 1
        self.place = self.rows[0] if self.is_view else torch.empty(rows * total.shape[1], length, total.shape[2])

    def __enter__(self) -> Tensor:
        return self.place

    def __exit__(self, *_: object) -> None:
        if not self.is_view:
            self.rows.copy_(self.place.view(self.rows.shape))


def _blocks(length: int) -> list[tuple[int, int]]:
    """Borders of a segment's blocks of queries."""
    half = length // 2
    return [(0, length)] if length < _SHORTEST_HALVED else [(0, half), (half, length)]


@functools.lru_cache(maxsize=1)
def _causal_mask() -> Tensor:
    return torch.full((LONGEST_KEPT, LONGEST_KEPT), float("-inf")).triu(1)


def _attend_kept(q: Tensor, k: Tensor, v: Tensor, scale: float, kept: list[Tensor], out: Tensor) -> None:
    """Heads `[B, L, D]`; the probabilities are appended to `kept`, a tensor for each block of queries."""
    for start, end in _blocks(q.shape[1]):
        mask = _causal_mask()[start:end, :end]
        scores = torch.baddbmm(mask, q[:, start:end], k[:, :end].transpose(1, 2), alpha=scale)
        kept.append(torch.softmax(scores, -1))
        torch.bmm(kept[-1], v[:, :end], out=out[:, start:end])


def _attend_kept_backward(parts: list[Tensor], scale: float, kept: list[Tensor], places: list[Tensor]) -> None:
    """Write the gradients of queries, keys and values to `places`; `parts`: the output's gradient, q, k, v."""
    grad, q, k, v = parts
    d_q, d_k, d_v = places
    for (start, end), probs in zip(reversed(_blocks(q.shape[1])), reversed(kept), strict=True):
        own, transposed = grad[:, start:end], probs.transpose(1, 2)
        d_probs = torch.bmm(own, v[:, :end].transpose(1, 2))
        d_scores = _ops._softmax_backward_data(d_probs, probs, -1, torch.float32).mul_(scale)
        torch.bmm(d_scores, k[:, :end], out=d_q[:, start:end])
        if end == q.shape[1]:  # the last block comes first and has all keys
            torch.bmm(transposed, own, out=d_v)
            torch.bmm(d_scores.transpose(1, 2), q[:, start:end], out=d_k)
        else:
            d_v[:, :end].baddbmm_(transposed, own)
            d_k[:, :end].baddbmm_(d_scores.transpose(1, 2), q[:, start:end])
