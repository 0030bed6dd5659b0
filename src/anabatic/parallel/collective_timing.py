"""Timing of collectives, measured on the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


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
