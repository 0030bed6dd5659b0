"""One thread that reads the devices again and again; the last good reading is kept, with its age."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from anabatic.monitor.snapshot import Snapshot
from anabatic.monitor.sources.selection import DeviceSource

MAX_READ_FRACTION = 0.5
"""A source is not read for a larger share of the time: a slow npu-smi is then asked less often than wished."""


@dataclass(frozen=True)
class Frame:
    """Current state.

    Attributes:
        number: counts the readings, failed ones too.
        snapshot: the last good reading; the failed one where none was good yet.
        problem: why the newest reading failed; empty when it did not.
        now: the time on the clock in a recording; None: the clock's.
    """

    number: int
    snapshot: Snapshot
    problem: str = ""
    hint: str = ""
    now: float | None = None

    def get_age(self) -> float:
        """Seconds since the good reading."""
        return max((time.time() if self.now is None else self.now) - self.snapshot.taken_at, 0.0)


def compute_pause(interval: float, took: float, max_fraction: float) -> float:
    """Return the seconds between a reading that took `took` and the next one."""
    return max(interval - took, took * (1 - max_fraction) / max_fraction)


class DeviceSampler:
    """Reads `source` every `interval` seconds in its own thread until it is closed."""

    def __init__(self, source: DeviceSource, interval: float, max_fraction: float = MAX_READ_FRACTION) -> None:
        self._source, self._interval, self._max_read_fraction = source, interval, max_fraction
        self._frame: Frame | None = None
        self._new_frame = threading.Condition()
        self._closed = threading.Event()
        # A daemon: a driver call that never returns must not keep the program from ending.
        self._thread = threading.Thread(target=self._run_loop, name="anabatic-monitor", daemon=True)
        self._thread.start()

    def get_frame(self, after: int = 0, timeout: float | None = 0.0) -> Frame | None:
        """Return the newest frame, waiting up to `timeout` seconds for one later than number `after`."""
        with self._new_frame:
            self._new_frame.wait_for(lambda: self._frame is not None and self._frame.number > after, timeout)
            return self._frame

    def close(self, wait: float = 0.0) -> None:
        """Ask the thread to end, and wait up to `wait` seconds for a reading that is under way."""
        self._closed.set()
        self._thread.join(wait)

    def _run_loop(self) -> None:
        number = 0
        while not self._closed.is_set():
            started = time.monotonic()
            found = self._read_source()
            number += 1
            with self._new_frame:
                self._frame = self._make_frame(number, found)
                self._new_frame.notify_all()
            self._closed.wait(compute_pause(self._interval, time.monotonic() - started, self._max_read_fraction))

    def _read_source(self) -> Snapshot:
        try:
            return self._source.read()
        except Exception as error:  # a vendor's library may raise anything; the screen must live and say it
            return Snapshot("none", error=f"{type(error).__name__}: {error}", hint="run again with --debug")

    def _make_frame(self, number: int, found: Snapshot) -> Frame:
        if found.error is None:
            return Frame(number, found)
        last = self._frame.snapshot if self._frame is not None and self._frame.snapshot.error is None else found
        return Frame(number, last, found.error, found.hint)
