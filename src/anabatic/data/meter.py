"""Progress of work that reads an unknown amount of text: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from anabatic.core import log
from anabatic.core.text import count, duration

EVERY = 5.0
"""Seconds between plain lines."""


class Meter:
    """Count characters and show them; only rank 0 shows anything, and nothing in the first two seconds.

    Use as a context manager: `with Meter("reading text") as meter: ... meter.add(len(text))`.
    """

    def __init__(self, what: str) -> None:
        self.chars = 0
        self._what = what
        self._started = self._said = time.monotonic()
        self._live: Progress | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the meter was made."""
        return time.monotonic() - self._started

    def __enter__(self) -> Meter:
        if sys.stderr.isatty() and log.rank() == 0:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._live = Progress(*columns, console=Console(stderr=True), transient=True)
            self._live.add_task(self._what)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def add(self, chars: int) -> None:
        """Count `chars` more characters."""
        self.chars += chars
        self._show(f"{self._what}: {count(self.chars)} characters")

    def phase(self, what: str) -> None:
        """Say what happens from here on."""
        self._what = what
        if self.seconds > 2.0:
            self._said = 0.0
        self._show(what)

    def _show(self, text: str) -> None:
        if self._live is not None:
            self._live.update(self._live.task_ids[0], description=text)
            return
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            log.info(f"{text}, {duration(self.seconds)}")
