"""How long exchanges between processes take, the slowest of them counting."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def time_slowest_rank(
    call: Callable[[], object], times: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Return the seconds of `times` calls on the slowest process of a group; all of them call this.

    Args:
        device: where the tensors are: it is waited for.
    """
    took = torch.zeros(1, device=device)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    float(took)  # all are here, and their devices have nothing else to do
    begun = time.perf_counter()
    for _ in range(times):
        call()
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
    took.fill_(time.perf_counter() - begun)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    return float(took)


def count_calls(
    call: Callable[[], object], device: torch.device, seconds: float, most: int, group: dist.ProcessGroup | None = None
) -> int:
    """Return how many calls fill about `seconds`, at least 1, the same on every process; connections are made first."""
    time_slowest_rank(call, 1, device, group)
    return max(1, min(most, int(seconds / time_slowest_rank(call, 1, device, group))))
