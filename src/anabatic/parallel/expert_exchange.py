"""Expert parallelism: rows of tokens go to the ranks that hold their experts, and the results come back.

Every rank holds `E / n` consecutive experts. Rows that are sorted by expert are sorted by rank, too: one all-to-all
sends them, another returns the results; each gradient takes the opposite way (GShard, arXiv 2006.16668, section 3.2,
without its capacity: no row is dropped, so the sizes of the exchange differ from batch to batch). The numbers of rows
are exchanged first and read on the host, the only synchronization of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.parallel.mesh import RankGroup


@dataclass(frozen=True)
class ExchangePlan:
    """Which rows go where.

    Attributes:
        sent, received: rows to and from each rank.
        order: int64 `[R]`, the received row at each place when they are sorted by expert; places: the inverse.
        ends: int64 `[E / n]`, ends of the rows of this rank's experts in that order.
    """

    group: RankGroup
    sent: list[int]
    received: list[int]
    order: Tensor
    places: Tensor
    ends: Tensor


@torch.no_grad()
def plan_exchange(ends: Tensor, group: RankGroup) -> ExchangePlan:
    """Plan the exchange of rows sorted by expert; all ranks of the group call it.

    Args:
        ends: int64 `[E]`, ends of the rows of each expert on this rank.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group.process_group)
    by_rank = torch.stack((counts, arriving)).view(2, group.size, -1)
    sent, received = by_rank.sum(2).tolist()
    local = by_rank.shape[2]
    experts = torch.arange(local, device=ends.device).repeat(group.size)
    row_experts = experts.repeat_interleave(arriving, output_size=sum(received))
    order = torch.argsort(row_experts, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return ExchangePlan(group, sent, received, order, places, by_rank[1].sum(0).cumsum(0))


def dispatch_rows(rows: Tensor, plan: ExchangePlan) -> Tensor:
    """`rows [S, H]` sorted by expert -> those of this rank's experts from all ranks, `[R, H]`, sorted by expert."""
    arrived: Tensor = _Exchange.apply(rows, plan.sent, plan.received, plan.group)  # type: ignore[no-untyped-call]
    out: Tensor = _Reorder.apply(arrived, plan.order, plan.places)  # type: ignore[no-untyped-call]
    return out


def combine_rows(rows: Tensor, plan: ExchangePlan) -> Tensor:
    """Return the results of `dispatch_rows` to where the rows came from, `[R, H]` -> `[S, H]`."""
    arrived = _Reorder.apply(rows, plan.places, plan.order)  # type: ignore[no-untyped-call]
    out: Tensor = _Exchange.apply(arrived, plan.received, plan.sent, plan.group)  # type: ignore[no-untyped-call]
    return out


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: RankGroup) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group.process_group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: RankGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _Reorder(torch.autograd.Function):
    """Rows in another order; the gradient is the inverse order, not a sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None
