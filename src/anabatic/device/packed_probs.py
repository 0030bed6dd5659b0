"""Causal attention of packed segments on a processor, forward and gradient as plain functions on `[T, heads, D]`, fp32.

Short segments are batched products whose probabilities are kept: half the time of torch's kernel, which computes the
scores again for the gradient (docs/dev). Long ones go to that kernel, since probabilities grow with the square.
"""

from __future__ import annotations

import functools

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
        if length <= LONGEST_KEPT:
            result = _attend_kept(of_q, of_k, of_v, scale, kept)
        else:
            result, log_sums = _ops._scaled_dot_product_flash_attention_for_cpu(
                *(x.unflatten(0, (rows, -1)) for x in (of_q, of_k, of_v)), 0.0, True, scale=scale
            )
            kept += [result, log_sums]
        _copy_back(out, result, start, rows, length)
    return segments.gather_packed(out), kept


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scale: float, kept: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys, `[T, N + K, D]`, and of values, `[T, K, D]`.

    Args:
        grad: `[T, N, D]`; kept: from `attend_forward` with the same arguments.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    q, k, v = _spread(q, k, v, segments)
    grad = segments.spread_gradient(grad)
    rest = iter(kept)
    d_q, d_k, d_v = (torch.empty(q.shape) for _ in range(3))
    for start, rows, length in segments.groups:
        parts = [_heads_first(x, start, rows, length) for x in (grad, q, k, v)]
        if length <= LONGEST_KEPT:
            found = _attend_kept_backward(*parts, scale, [next(rest) for _ in _blocks(length)])
        else:
            of_grad, *of_qkv = (x.unflatten(0, (rows, -1)) for x in parts)
            found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
                of_grad, *of_qkv, next(rest), next(rest), 0.0, True, scale=scale
            )
        for total, part in zip((d_q, d_k, d_v), found, strict=True):
            _copy_back(total, part, start, rows, length)
    d_q, d_k, d_v = (segments.gather_packed(x) for x in (d_q, d_k, d_v))
    joint = torch.empty(tokens, heads + kv_heads, dim)
    joint[:, :heads] = d_q
    if heads == kv_heads:
        joint[:, heads:] = d_k
        return joint, d_v
    torch.sum(d_k.view(tokens, kv_heads, -1, dim), dim=2, out=joint[:, heads:])
    return joint, d_v.view(tokens, kv_heads, -1, dim).sum(2)


def _spread(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments) -> tuple[Tensor, Tensor, Tensor]:
    """In the order of the groups, with a key and a value head for every query head."""
    share = q.shape[1] // k.shape[1]
    q, k, v = (segments.spread_groups(x) for x in (q, k, v))
    return (q, k, v) if share == 1 else (q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1))


def _heads_first(x: Tensor, start: int, rows: int, length: int) -> Tensor:
    """`[rows * N, length, D]` of a group; a view of a single segment."""
    part = x[start : start + rows * length]
    return part.transpose(0, 1) if rows == 1 else part.unflatten(0, (rows, length)).transpose(1, 2).flatten(0, 1)


def _copy_back(total: Tensor, part: Tensor, start: int, rows: int, length: int) -> None:
    """Write what has heads first to rows of `[T, N, D]`."""
    place = total[start : start + rows * length].unflatten(0, (rows, length)).transpose(1, 2)
    place.copy_(part.view(place.shape) if part.dim() == 3 else part)


def _blocks(length: int) -> list[tuple[int, int]]:
    """Borders of a segment's blocks of queries."""
    half = length // 2
    return [(0, length)] if length < _SHORTEST_HALVED else [(0, half), (half, length)]


@functools.lru_cache(maxsize=1)
def _causal_mask() -> Tensor:
    return torch.full((LONGEST_KEPT, LONGEST_KEPT), float("-inf")).triu(1)


def _attend_kept(q: Tensor, k: Tensor, v: Tensor, scale: float, kept: list[Tensor]) -> Tensor:
    """Heads `[B, L, D]`; the probabilities are appended to `kept`, a tensor for each block of queries."""
    outs = []
    for start, end in _blocks(q.shape[1]):
        mask = _causal_mask()[start:end, :end]
        scores = torch.baddbmm(mask, q[:, start:end], k[:, :end].transpose(1, 2), alpha=scale)
        kept.append(torch.softmax(scores, -1))
        outs.append(torch.bmm(kept[-1], v[:, :end]))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _attend_kept_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, kept: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    length = q.shape[1]
    d_qs: list[Tensor] = []
    d_k = d_v = grad
    for (start, end), probs in zip(reversed(_blocks(length)), reversed(kept), strict=True):
        own = grad[:, start:end]
        d_scores = _ops._softmax_backward_data(torch.bmm(own, v[:, :end].transpose(1, 2)), probs, -1, torch.float32)
        d_scores.mul_(scale)
        d_qs.insert(0, torch.bmm(d_scores, k[:, :end]))
        if end == length:  # the last block comes first and has all keys
            d_v = torch.bmm(probs.transpose(1, 2), own)
            d_k = torch.bmm(d_scores.transpose(1, 2), q[:, start:end])
        else:
            d_v[:, :end] += torch.bmm(probs.transpose(1, 2), own)
            d_k[:, :end] += torch.bmm(d_scores.transpose(1, 2), q[:, start:end])
    return d_qs[0] if len(d_qs) == 1 else torch.cat(d_qs, 1), d_k, d_v
