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
from anabatic.parallel.mesh import RankGroup

MAX_SAMPLES = 8
"""Steps between two rows of which times are kept, the last ones."""
_PROBE_ELEMENTS = 1 << 20
"""fp32 numbers of a broadcast, 4 MiB: a fifth of a millisecond over a link of 25 GB/s."""
_PROBE_REPEATS = 3
"""The fastest counts."""
_PRODUCT_SIZES = {"cpu": 384}
_DEVICE_PRODUCT_SIZE = 1536
"""Rows of the matrices: some tens of microseconds at a chip's peak."""


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of a step's last micro-batch: this rank's own work, and its wait for others; 0: not measured."""

    compute_s: float = 0.0
    wait_s: float = 0.0


class DeviceClock:
    """Marks of time in the device's queue, which cost the host no wait; on a processor, of the host itself."""

    def __init__(self, device: Device) -> None:
        self._module = None if device.type in ("cpu", "mps") else torch.get_device_module(device.type)

    def mark_time(self) -> Any:
        """Return a mark of what was launched so far."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def measure_span(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks, which the device must have reached."""
        return float(end - begin) if self._module is None else begin.elapsed_time(end) / 1e3

    def wait(self) -> None:
        """Wait until the device has reached all marks."""
        if self._module is not None:
            self._module.synchronize()


class StepTimer:
    """Times of the last steps: (begin, own work done, all done) of their last micro-batch."""

    def __init__(self, device: Device) -> None:
        self._clock = DeviceClock(device)
        self._marks: deque[list[Any]] = deque(maxlen=MAX_SAMPLES)

    def start_micro_batch(self) -> None:
        """Mark the start of a step's last micro-batch."""
        self._marks.append([self._clock.mark_time()])

    def watch_backward(self, loss: Tensor) -> None:
        """Mark the end of this rank's own work when the backward pass of `loss` has come to its end."""
        loss.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback(self._mark_own_end))

    def finish_step(self) -> None:
        """Mark the moment at which the gradients of all ranks have arrived."""
        self._marks[-1].append(self._clock.mark_time())

    def take_times(self) -> StepTimes:
        """Return the times since the last call; the device must be idle."""
        whole = [marks for marks in self._marks if len(marks) == 3]
        self._marks.clear()
        if not whole:
            return StepTimes()
        own = statistics.median(self._clock.measure_span(begin, middle) for begin, middle, _ in whole)
        return StepTimes(own, statistics.median(self._clock.measure_span(middle, end) for _, middle, end in whole))

    def _mark_own_end(self) -> None:
        self._marks[-1].append(self._clock.mark_time())


def time_broadcasts(world: RankGroup, device: Device) -> tuple[list[float], float]:
    """Return how long a broadcast of 4 MiB from each rank takes, as this rank sees it, and all of them together.

    In seconds; all ranks call this, and the host waits once. A slow link makes the broadcasts of its own rank slow for
    all, and those of the others only for this rank.
    """
    values = torch.zeros(_PROBE_ELEMENTS, device=device.torch_device)
    ready = torch.zeros(1, device=device.torch_device)
    clock, marks, start = DeviceClock(device), [], time.perf_counter()
    for number in range(_PROBE_REPEATS * world.size):
        dist.all_reduce(ready)  # who is still busy with the last broadcast is waited for here
        begin = clock.mark_time()
        dist.broadcast(values, number % world.size)
        marks.append((begin, clock.mark_time()))
    clock.wait()
    spans = [clock.measure_span(*pair) for pair in marks]
    return [min(spans[source :: world.size]) for source in range(world.size)], time.perf_counter() - start


def time_products(device: Device) -> tuple[float, float]:
    """Return the seconds of a product of two square matrices in the compute dtype on this device, and of all tries."""
    size = _PRODUCT_SIZES.get(device.type, _DEVICE_PRODUCT_SIZE)
    factor = torch.zeros(size, size, dtype=device.dtype, device=device.torch_device)
    clock, marks, start = DeviceClock(device), [], time.perf_counter()
    for _ in range(_PROBE_REPEATS + 1):  # the first one loads the kernel
        begin = clock.mark_time()
        factor @ factor
        marks.append((begin, clock.mark_time()))
    clock.wait()
    return min(clock.measure_span(*pair) for pair in marks), time.perf_counter() - start
