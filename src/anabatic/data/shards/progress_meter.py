"""Progress of work that reads an unknown amount of text: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from anabatic.core import log
from anabatic.core.formatting import format_count, format_duration

LOG_INTERVAL_SECONDS = 5.0
"""Seconds between plain lines."""


class ProgressMeter:
    """Count characters and show them; only rank 0 shows anything, and nothing in the first two seconds.

    Use as a context manager: `with Meter("reading text") as meter: ... meter.add(len(text))`.
    """

    def __init__(self, what: str) -> None:
        self.num_chars = 0
        self._description = what
        self._started = self._last_logged = time.monotonic()
        self._live: Progress | None = None

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the meter was made."""
        return time.monotonic() - self._started

    def __enter__(self) -> ProgressMeter:
        if sys.stderr.isatty() and log.get_rank() == 0:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._live = Progress(*columns, console=Console(stderr=True), transient=True)
            self._live.add_task(self._description)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def add_chars(self, chars: int) -> None:
        """Count `num_chars` more characters."""
        self.num_chars += chars
        self._show_progress(f"{self._description}: {format_count(self.num_chars)} characters")

    def start_phase(self, what: str) -> None:
        """Say what happens from here on."""
        self._description = what
        if self.elapsed_seconds > 2.0:
            self._last_logged = 0.0
        self._show_progress(what)

    def _show_progress(self, text: str) -> None:
        if self._live is not None:
            self._live.update(self._live.task_ids[0], description=text)
            return
        now = time.monotonic()
        if now - self._last_logged >= LOG_INTERVAL_SECONDS:
            self._last_logged = now
            log.info(f"{text}, {format_duration(self.elapsed_seconds)}")
