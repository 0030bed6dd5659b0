"""Device figures beside the training's own: read by one thread of rank 0, which waits for no kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from anabatic.config.shared import Log
from anabatic.core import log as messages
from anabatic.device.device import Device
from anabatic.device.own import OwnDevice, known_as
from anabatic.monitor.sampler import Sampler
from anabatic.monitor.snapshot import Snapshot
from anabatic.monitor.sources import Source, accelerators
from anabatic.monitor.window import Window
from anabatic.parallel.world import World

SHARE = 0.1
"""Of the time at most for reading: a slow npu-smi is asked less often."""
_LAST_SECONDS = 1.0
"""What the end of a training waits for a reading that is under way: torch must not be asked while it is taken down."""


class _Chosen:
    """The machine's source, else torch; chosen by the thread that reads, so that the training does not wait for it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._source: Source | None = None

    def read(self) -> Snapshot:
        if self._source is not None:
            return self._source.read()
        self._source, notes = accelerators()
        found = None if self._source is None else self._source.read()
        if found is None or found.error is not None:
            notes += [] if found is None else [str(found.error)]
            self._source = OwnDevice(self._device)
            found = self._source.read()
        why = f" ({'; '.join(notes)})" if notes else ""
        messages.info(f"device figures come from {found.source}{why}")
        return found


def local_size() -> int:
    """Return the number of this job's processes on this machine, as its launcher set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def watching(log: Log, device: Device, world: World) -> Iterator[Window | None]:
    """Yield the figures of this job's devices on this machine; None on a processor, on other ranks, or when off."""
    if device.type in ("cpu", "mps") or not world.first or not log.device_every:
        yield None
        return
    window = Window(_Chosen(device), known_as(device, local_size()))
    sampler = Sampler(window, log.device_every, SHARE)
    try:
        yield window
    finally:
        sampler.close(_LAST_SECONDS)


def share(world: World) -> float:
    """Return the share of the job's tokens that this machine trains."""
    return local_size() / world.size
