"""Causal attention of packed segments by torch's kernel for processors, forward and gradient as plain functions, fp32.

Shapes: `T` tokens, `N` query heads, `K` key/value heads (N a multiple of K), `D` head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabatic.device.attention import PackedSegments

_ops = torch.ops.aten


def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the attention `[T, N, D]`, and what `attend_backward` needs of each group of segments.

    Args:
        q: `[T, N, D]`; k, v: `[T, K, D]`.
        segments: causal ones.
    """
    inputs = [segments.spread_groups(x) for x in (q, k, v)]
    out, kept = torch.empty(inputs[0].shape), list[Tensor]()
    for start, rows, length in segments.groups:
        of_group = [_heads_first(x, start, rows, length) for x in inputs]
        found = _ops._scaled_dot_product_flash_attention_for_cpu(*of_group, 0.0, True, scale=scale)
        _heads_first(out, start, rows, length).copy_(found[0])
        kept += found
    return segments.gather_packed(out), kept


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scale: float, kept: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys, `[T, N + K, D]`, and of values, `[T, K, D]`.

    Args:
        grad: `[T, N, D]`; kept: from `attend_forward` with the same arguments.
    """
    heads = q.shape[1]
    inputs = [segments.spread_gradient(grad), *(segments.spread_groups(x) for x in (q, k, v))]
    joint, d_v = torch.empty(len(inputs[0]), heads + k.shape[1], q.shape[2]), torch.empty(inputs[3].shape)
    rest = iter(kept)
    for start, rows, length in segments.groups:
        of_group = [_heads_first(x, start, rows, length) for x in inputs]
        found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *of_group, next(rest), next(rest), 0.0, True, scale=scale
        )
        for total, part in zip((joint[:, :heads], joint[:, heads:], d_v), found, strict=True):
            _heads_first(total, start, rows, length).copy_(part)
    return segments.gather_packed(joint), segments.gather_packed(d_v)


def _heads_first(x: Tensor, start: int, rows: int, length: int) -> Tensor:
    """The rows of a group of `[T, heads, D]` as a view `[rows, heads, length, D]`."""
    return x[start : start + rows * length].unflatten(0, (rows, length)).transpose(1, 2)
