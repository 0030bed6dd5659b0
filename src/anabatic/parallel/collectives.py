"""Collectives that also work with one process, and the time that one takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.parallel.mesh import (
    RankGroup,
)
from anabatic.parallel.world import World

if TYPE_CHECKING:  # half a second of imports, for several processes alone
    pass


def barrier(group: RankGroup) -> None:
    """Wait until every rank of the group is here."""
    if group.size > 1:
        dist.barrier(group=group.process_group)


def all_reduce_sum(values: Tensor, world: RankGroup) -> Tensor:
    """Sum `values` over the ranks, in place, and return them."""
    if world.size > 1:
        dist.all_reduce(values, group=world.process_group)
    return values


def broadcast_text(text: str, world: World) -> str:
    """Return rank 0's text on every rank."""
    if world.size == 1:
        return text
    objects = [text]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def all_gather_text(text: str, world: World) -> list[str]:
    """Return every rank's text, in the order of ranks."""
    if world.size == 1:
        return [text]
    texts = [""] * world.size
    dist.all_gather_object(texts, text)
    return texts


def gather_text(text: str, group: RankGroup) -> list[str]:
    """Return every rank's text on rank 0 of the group, in the order of ranks; nothing on the others."""
    if group.size == 1:
        return [text]
    texts = [""] * group.size if group.rank == 0 else None
    dist.gather_object(text, texts, dst=0, group=group.process_group)
    return texts or []


def all_gather_rows(rows: Tensor, world: RankGroup) -> Tensor:
    """Stack the ranks' equally shaped `[n, ...]` tensors into `[size x n, ...]`."""
    if world.size == 1:
        return rows
    out = rows.new_empty(world.size * rows.shape[0], *rows.shape[1:])
    # torch 2.13 renamed all_gather_into_tensor and warns; older releases have only the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(out, rows.contiguous(), group=world.process_group)
    return out


def time_slowest_rank(
    call: Callable[[], object], repeats: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Return the seconds of `repeats` calls on the slowest rank of a group; all ranks call this.

    Args:
        device: device of the tensors, synchronized before time is read.
    """
    elapsed = torch.zeros(1, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
    float(elapsed)  # waits until all ranks are here and their devices are idle
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
    elapsed.fill_(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
    return float(elapsed)


def count_calls(
    call: Callable[[], object],
    device: torch.device,
    seconds: float,
    max_calls: int,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Return how many calls take about `seconds`, at least 1, equal on every rank; a first call sets up connections."""
    time_slowest_rank(call, 1, device, group)
    return max(1, min(max_calls, int(seconds / time_slowest_rank(call, 1, device, group))))
