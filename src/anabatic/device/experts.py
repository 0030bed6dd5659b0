"""Operators of expert layers: sort tokens by expert, one grouped product per projection, restore the order.

Shapes: `T` tokens, `k` experts per token, `S = T k` rows, `E` experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def permute_reference(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """`x [T, H]`, `index [T, k]` (experts of each token) -> rows `[S, H]` sorted by expert, positions `[S]`."""
    order = torch.argsort(index.flatten(), stable=True)
    rows = x.index_select(0, order // index.shape[1])
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    return rows, positions


def unpermute_reference(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """`rows [S, H]`, `positions [S]` of each token's experts, `weights [T, k]` -> the weighted sums `[T, H]`."""
    chosen = rows.index_select(0, positions).unflatten(0, weights.shape)
    return (chosen * weights.unsqueeze(-1).to(rows.dtype)).sum(dim=1)


def compute_expert_ends(index: Tensor, num_experts: int) -> Tensor:
    """Return the end of each expert's rows, int64 `[E]`, computed on the device without synchronization."""
    if index.device.type == "cpu":
        return torch.bincount(index.flatten(), minlength=num_experts).cumsum(0)
    expert_ids = torch.arange(num_experts, device=index.device)
    return (index.flatten()[:, None] == expert_ids).sum(0).cumsum(0)


_ALIGNMENT = 16
"""Bytes to which torch's grouped product requires rows to be aligned (aten/src/ATen/native/GroupedMMUtils.h)."""


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


class _TorchGroupedMatmul(torch.autograd.Function):
    """torch's own grouped product in all three directions, without synchronization.

    Its own derivative (torch 2.13) refuses gradients that are not contiguous, such as those of a sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        offsets = ends.to(torch.int32)
        ctx.save_for_backward(x, weight, offsets)
        return F.grouped_mm(x, weight, offs=offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_x = F.grouped_mm(grad, weight.transpose(1, 2), offs=offsets) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1] and weight.stride(-1) == 1:
            d_weight = F.grouped_mm(x.t(), grad, offs=offsets)
        elif ctx.needs_input_grad[1]:  # stored transposed: the gradient gets the same layout, without a copy
            d_weight = F.grouped_mm(grad.t(), x, offs=offsets).transpose(1, 2)
        return d_x, d_weight, None


def _takes_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's own grouped product takes these tensors."""
    if x.dtype == torch.float64 or not hasattr(F, "grouped_mm"):
        return False
    if x.device.type != "cpu":
        return True
    is_aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in (x.shape[1], weight.shape[2]))
    return is_aligned and len(x) > 0 and _has_grouped_mm_on_cpu(x.dtype)


@functools.cache
def _has_grouped_mm_on_cpu(dtype: torch.dtype) -> bool:
    """Return whether this torch multiplies groups on a processor, an empty one too; older ones do so on CUDA alone."""
    x, weight = torch.ones(2, 16, dtype=dtype), torch.ones(2, 16, 16, dtype=dtype)
    offsets = torch.tensor([0, 2], dtype=torch.int32)
    try:
        rows, stacked = F.grouped_mm(x, weight, offs=offsets), F.grouped_mm(x.t(), x, offs=offsets)
    except RuntimeError:  # an older torch says that it has no such product on a processor; ours gives the same result
        return False
    return bool((rows == 16).all()) and stacked.sum((1, 2)).tolist() == [0, 2 * 16 * 16]


def grouped_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x [S, in]` in groups of rows, `weight [E, in, out]`, `ends [E]` of the groups -> `[S, out]`."""
    function = _TorchGroupedMatmul if _takes_grouped_mm(x, weight) else _GroupedMatmul
    out: Tensor = function.apply(x.contiguous(), weight, ends)  # type: ignore[no-untyped-call]
    return out
