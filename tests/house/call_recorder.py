"""Record which functions run, in which order, also in processes that are forked and have dropped all privileges.

Standard library only: a bare interpreter imports it too. Each process writes to a memory map that was opened before it
was forked, so a namespace or a system-call filter does not stop it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

EVENT = struct.Struct("<QI")
"""Nanoseconds of the machine's clock, and number of the step plus 1: 0 is unused space."""
REGIONS = struct.Struct("<Q")
"""Regions taken by forked processes, at the start of the file, in the place of the first event."""
REGION_BYTES, MAX_PROCESSES = EVENT.size << 14, 32


class CallRecorder:
    """Records the calls of some functions in this process and those forked from it.

    Args:
        file: written here; one for each process that was not forked.
        source: folder that file names are relative to.
        steps: `room/file.py: function`; the number of an event is its place here.
    """

    def __init__(self, file: Path, source: str, steps: Collection[str]) -> None:
        with open(file, "wb+") as handle:
            handle.truncate(REGION_BYTES * MAX_PROCESSES)  # a process has one region
            self.map = mmap.mmap(handle.fileno(), 0)
        self.source = source.rstrip(os.sep) + os.sep
        self.numbers = {step: number for number, step in enumerate(steps, 1)}
        self.known: dict[CodeType, int] = {}
        self.region = 0
        self.places = itertools.count(1)
        os.register_at_fork(before=self._count_process, after_in_child=self._enter_region)

    def _count_process(self) -> None:
        """Take the next region for the process that is about to be forked; the count is shared by all of them."""
        self.region = REGIONS.unpack_from(self.map, 0)[0] + 1
        REGIONS.pack_into(self.map, 0, self.region)

    def _enter_region(self) -> None:
        self.places = itertools.count(self.region * REGION_BYTES // EVENT.size)

    def record_call(self, frame: FrameType, event: str, _: object) -> None:
        """Write one call, for `sys.setprofile`."""
        if event != "call":
            return
        code = frame.f_code
        number = self.known.get(code)
        if number is None:
            path = code.co_filename.removeprefix(self.source)
            number = self.known[code] = self.numbers.get(f"{path}: {code.co_name}", 0)
        if number and (place := next(self.places) * EVENT.size) + EVENT.size <= len(self.map):
            EVENT.pack_into(self.map, place, time.monotonic_ns(), number)

    def start(self) -> None:
        """Record from now on, in this thread and those that it starts."""
        threading.setprofile(self.record_call)
        sys.setprofile(self.record_call)

    def stop(self) -> None:
        """Stop recording in this thread."""
        sys.setprofile(None)
        threading.setprofile(None)
        self.numbers = {}
        self.known.clear()


@contextmanager
def recording(file: Path, source: str, steps: Collection[str]) -> Iterator[None]:
    """Record the calls of a `with` block."""
    recorder = CallRecorder(file, source, steps)
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()


def read_calls(files: Collection[Path], steps: list[str]) -> list[str]:
    """Return the recorded steps of several processes by time."""
    events: list[tuple[int, int]] = []
    for file in files:
        data = file.read_bytes()
        for start in range(0, len(data), REGION_BYTES):
            region = EVENT.iter_unpack(data[start or EVENT.size : start + REGION_BYTES])
            events += itertools.takewhile(lambda event: event[1] > 0, region)
    return [steps[number - 1] for _, number in sorted(events)]
