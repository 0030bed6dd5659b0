"""How long this rank computes and waits for others in a step, without a wait of the host.

The mark between the two is where the backward pass of the last micro-batch is done, before DDP or FSDP2 wait for the
gradients of the others: a final callback of autograd, queued when the backward pass begins, runs before theirs. On a
device, events mark the times, which are read where the loop logs.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.device.device import Device
from anabatic.parallel.process_groups import RankGroup

MAX_SAMPLES = 16
"""Steps between two rows of which times are kept, the last ones."""
_PROBE_ELEMENTS = 1 << 20
"""fp32 numbers of a broadcast, 4 MiB: a fifth of a millisecond over a link of 25 GB/s."""
_PROBE_REPEATS = 3
"""The fastest counts."""
_PRODUCT_SIZES = {"cpu": 384}
_DEVICE_PRODUCT_SIZE = 4096
"""Rows of the matrices: on a device about a millisecond."""


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of a step's last micro-batch: this rank's own work, and its wait for others; 0: not measured."""

    compute_s: float = 0.0
    wait_s: float = 0.0


class StepTimer:
    """Times of the last steps: (begin, own work done, all done) of their last micro-batch."""

    def __init__(self, device: Device) -> None:
        self._events = None if device.type in ("cpu", "mps") else torch.get_device_module(device.type).Event
        self._marks: deque[list[Any]] = deque(maxlen=MAX_SAMPLES)

    def start_micro_batch(self) -> None:
        """The last micro-batch of a step begins."""
        self._marks.append([self._mark_time()])

    def watch_backward(self, loss: Tensor) -> None:
        """Mark the end of this rank's own work when the backward pass of `loss` has come to its end."""
        loss.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback(self._mark_own_end))

    def finish_step(self) -> None:
        """The gradients of all ranks are here."""
        self._marks[-1].append(self._mark_time())

    def take_times(self) -> StepTimes:
        """Return the times since the last call; the device must be idle."""
        whole = [marks for marks in self._marks if len(marks) == 3]
        self._marks.clear()
        if not whole:
            return StepTimes()
        own = statistics.median(self._measure_span(begin, middle) for begin, middle, _ in whole)
        return StepTimes(own, statistics.median(self._measure_span(middle, end) for _, middle, end in whole))

    def _mark_own_end(self) -> None:
        self._marks[-1].append(self._mark_time())

    def _mark_time(self) -> Any:
        if self._events is None:
            return time.perf_counter()
        event = self._events(enable_timing=True)
        event.record()
        return event

    def _measure_span(self, begin: Any, end: Any) -> float:
        return float(end - begin) if self._events is None else begin.elapsed_time(end) / 1e3


def time_broadcasts(world: RankGroup, device: Device) -> tuple[list[float], float]:
    """Return how long a broadcast of 4 MiB from each rank takes, as this rank sees it, and all of them together.

    In seconds; all ranks call this. A slow link makes the broadcasts of its own rank slow for all, and those of the
    others only for this rank.
    """
    values = torch.zeros(_PROBE_ELEMENTS, device=device.torch_device)
    ready = torch.zeros(1, device=device.torch_device)
    best = [float("inf")] * world.size
    begin = time.perf_counter()
    for _ in range(_PROBE_REPEATS):
        for source in range(world.size):
            dist.all_reduce(ready)  # who is still busy with the last broadcast is waited for here
            _synchronize(device)
            start = time.perf_counter()
            dist.broadcast(values, source)
            _synchronize(device)
            best[source] = min(best[source], time.perf_counter() - start)
    return best, time.perf_counter() - begin


def time_products(device: Device) -> tuple[float, float]:
    """Return the seconds of a product of two square matrices in the compute dtype on this device, and of all tries."""
    size = _PRODUCT_SIZES.get(device.type, _DEVICE_PRODUCT_SIZE)
    factor = torch.zeros(size, size, dtype=device.dtype, device=device.torch_device)
    begin, best = time.perf_counter(), float("inf")
    for _ in range(_PROBE_REPEATS + 1):  # the first one loads the kernel
        _synchronize(device)
        start = time.perf_counter()
        factor @ factor
        _synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best, time.perf_counter() - begin


def _synchronize(device: Device) -> None:
    if device.type not in ("cpu", "mps"):
        torch.get_device_module(device.type).synchronize()
