"""Progress display: a live line on a terminal, from rank 0 only; without a terminal, log lines at intervals."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from anabatic.core import log
from anabatic.core.formatting import format_count, format_duration

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

LOG_INTERVAL_SECONDS = 5.0
"""Seconds between log lines if there is no terminal."""

_Line = TypeVar("_Line", bound="_LiveLine")


class _LiveLine(ABC):
    """One live line on the terminal; without a terminal, log lines."""

    def __init__(self, description: str, total: int | None = None) -> None:
        self._description = description
        self._total = total
        self._started = self._last_logged = time.monotonic()
        self._progress: Progress | None = None

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self._started

    @abstractmethod
    def make_columns(self) -> tuple[ProgressColumn, ...]:
        """Return the columns of the line."""

    def __enter__(self: _Line) -> _Line:
        if sys.stderr.isatty() and log.get_rank() == 0:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(*self.make_columns(), console=Console(stderr=True), transient=True)
            self._progress.add_task(self._description, total=self._total)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def show(self, text: str, *, completed: int | None = None, description: str | None = None) -> None:
        """Update the live line with `completed` and `description`, or log `text` if the interval has passed."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=completed, description=description)
            return
        now = time.monotonic()
        if now - self._last_logged >= LOG_INTERVAL_SECONDS:
            self._last_logged = now
            log.info(f"{text}, {format_duration(self.elapsed_seconds)}")


class ProgressBar(_LiveLine):
    """Progress of a known total. Use as a context manager: `with ProgressBar("rows", 100) as bar: bar.update(7)`."""

    def make_columns(self) -> tuple[ProgressColumn, ...]:
        """Return a bar, the count and the remaining time."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()

    def update(self, done: int) -> None:
        """Show that `done` of the total are finished."""
        self.show(f"{self._description}: {done} of {self._total}", completed=done)


class ProgressMeter(_LiveLine):
    """Progress of reading an unknown amount of text: counts characters.

    Use as a context manager: `with ProgressMeter("reading text") as meter: ... meter.add_chars(len(text))`.
    """

    def __init__(self, description: str) -> None:
        super().__init__(description)
        self.num_chars = 0

    def make_columns(self) -> tuple[ProgressColumn, ...]:
        """Return the description and the elapsed time."""
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        return SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()

    def add_chars(self, chars: int) -> None:
        """Count `chars` more characters."""
        self.num_chars += chars
        text = f"{self._description}: {format_count(self.num_chars)} characters"
        self.show(text, description=text)

    def start_phase(self, description: str) -> None:
        """Show the description of the next phase."""
        self._description = description
        if self.elapsed_seconds > 2.0:
            self._last_logged = 0.0
        self.show(description, description=description)


class _ByteCounter(_LiveLine):
    """Bytes read from files; shown only on a terminal."""

    def __init__(self) -> None:
        super().__init__("")

    def make_columns(self) -> tuple[ProgressColumn, ...]:
        """Return the bytes and their speed."""
        from rich.progress import DownloadColumn, SpinnerColumn, TransferSpeedColumn

        return SpinnerColumn(), DownloadColumn(), TransferSpeedColumn()

    def add_bytes(self, num_bytes: int) -> None:
        """Count `num_bytes` more bytes."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0], num_bytes)


@contextmanager
def show_read_progress() -> Iterator[Callable[[int], None]]:
    """Show the number of bytes read; call the yielded function to count them."""
    with _ByteCounter() as counter:
        yield counter.add_bytes
