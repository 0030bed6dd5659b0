"""Device figures beside the training's own: read by one thread of rank 0, which waits for no kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from anabatic.config.sections.common import LogSettings
from anabatic.core import log as messages
from anabatic.device.device import Device, TorchDeviceSource, get_device_ids
from anabatic.monitor.sampler import DeviceSampler
from anabatic.monitor.snapshot import Snapshot
from anabatic.monitor.sources.selection import DeviceSource, find_accelerator_source
from anabatic.monitor.usage_window import UsageWindow
from anabatic.parallel.world import World

MAX_READ_FRACTION = 0.1
"""Of the time at most for reading: a slow npu-smi is asked less often."""
_FINAL_WAIT_SECONDS = 1.0
"""What the end of a training waits for a reading that is under way: torch must not be asked while it is taken down."""


class _FallbackSource:
    """The machine's source, else torch; chosen by the thread that reads, so that the training does not wait for it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._source: DeviceSource | None = None

    def read(self) -> Snapshot:
        if self._source is not None:
            return self._source.read()
        self._source, notes = find_accelerator_source()
        found = None if self._source is None else self._source.read()
        if found is None or found.error is not None:
            notes += [] if found is None else [str(found.error)]
            self._source = TorchDeviceSource(self._device)
            found = self._source.read()
        why = f" ({'; '.join(notes)})" if notes else ""
        messages.info(f"device figures come from {found.source}{why}")
        return found


def count_local_processes() -> int:
    """Return the number of this job's processes on this machine, as its launcher set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def watch_devices(log: LogSettings, device: Device, world: World) -> Iterator[UsageWindow | None]:
    """Yield the figures of this job's devices on this machine; None on a processor, on other ranks, or when off."""
    if device.type in ("cpu", "mps") or not world.is_main_process or not log.device_every:
        yield None
        return
    window = UsageWindow(_FallbackSource(device), get_device_ids(device, count_local_processes()))
    sampler = DeviceSampler(window, log.device_every, MAX_READ_FRACTION)
    try:
        yield window
    finally:
        sampler.close(_FINAL_WAIT_SECONDS)


def local_token_fraction(world: World) -> float:
    """Return the share of the job's tokens that this machine trains."""
    return count_local_processes() / world.size
