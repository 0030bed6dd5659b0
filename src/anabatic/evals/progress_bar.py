"""Progress of work whose end is known: a bar on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anabatic.core import log
from anabatic.core.formatting import format_duration

LOG_INTERVAL_SECONDS = 5.0
"""Seconds between log lines where there is no terminal."""


class ProgressBar:
    """Use as a context manager and say how far things are: `bar.to(done)`."""

    def __init__(self, what: str, total: int) -> None:
        self._label = what
        self._total = total
        self._started = self._logged_at = time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty() and log.get_rank() == 0:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.add_task(self._label, total=self._total)
            self._progress.start()
        return self

    def update(self, done: int) -> None:
        """Show that `done` of the total are done."""
        now = time.monotonic()
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done)
        elif now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = now
            log.info(f"{self._label}: {done} of {self._total}, {format_duration(now - self._started)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
