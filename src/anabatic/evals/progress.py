"""Progress of work whose end is known: a bar on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anabatic.core import log
from anabatic.core.text import duration

EVERY = 5.0
"""Seconds between log lines where there is no terminal."""


class Bar:
    """Use as a context manager and say how far things are: `bar.to(done)`."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._started = self._said = time.monotonic()
        self._live: Progress | None = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty() and log.rank() == 0:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._live = Progress(*columns, console=Console(stderr=True), transient=True)
            self._live.add_task(self._what, total=self._total)
            self._live.start()
        return self

    def to(self, done: int) -> None:
        """Show that `done` of the total are done."""
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=done)
        elif now - self._said >= EVERY:
            self._said = now
            log.info(f"{self._what}: {done} of {self._total}, {duration(now - self._started)}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
