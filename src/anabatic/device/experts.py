"""Operators of expert layers: sort tokens by expert, one grouped product per projection, restore the order.

Shapes: `T` tokens, `k` experts per token, `S = T k` rows, `E` experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def permute_reference(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """`x [T, H]`, `index [T, k]` (experts of each token) -> rows `[S, H]` sorted by expert, positions `[S]`."""
    order = torch.argsort(index.flatten(), stable=True)
    rows = x.index_select(0, order // index.shape[1])
    return rows, torch.argsort(order)


def unpermute_reference(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """`rows [S, H]`, `positions [S]` of each token's experts, `weights [T, k]` -> the weighted sums `[T, H]`."""
    chosen = rows.index_select(0, positions).unflatten(0, weights.shape)
    return (chosen * weights.unsqueeze(-1).to(rows.dtype)).sum(dim=1)


def compute_expert_ends(index: Tensor, num_experts: int) -> Tensor:
    """Return the end of each expert's rows, int64 `[E]`, computed on the device without synchronization."""
    expert_ids = torch.arange(num_experts, device=index.device)
    return (index.flatten()[:, None] == expert_ids).sum(0).cumsum(0)


class _GroupedMatmul(torch.autograd.Function):
    """One product for each expert with rows. Reads the ends on the host: free on a CPU, a synchronization elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ends = ends.tolist()
        out = x.new_empty(x.shape[0], weight.shape[2])
        for expert, start, end in _nonempty_groups(ctx.ends):
            torch.mm(x[start:end], weight[expert], out=out[start:end])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        d_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, start, end in _nonempty_groups(ctx.ends):
            if d_x is not None:
                torch.mm(grad[start:end], weight[expert].t(), out=d_x[start:end])
            if d_weight is not None:
                torch.mm(x[start:end].t(), grad[start:end], out=d_weight[expert])
        return d_x, d_weight, None


def _nonempty_groups(ends: list[int]) -> list[tuple[int, int, int]]:
    starts = [0, *ends[:-1]]
    return [(n, start, end) for n, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]


def grouped_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x [S, in]` in groups of rows, `weight [E, in, out]`, `ends [E]` of the groups -> `[S, out]`."""
    if x.device.type == "cpu" or x.dtype == torch.float64 or not hasattr(F, "grouped_mm"):
        out: Tensor = _GroupedMatmul.apply(x, weight, ends)  # type: ignore[no-untyped-call]
        return out
    product: Tensor = F.grouped_mm(x, weight, offs=ends.to(torch.int32))
    return product
