"""The heartbeat of a training process: a few bytes that its launcher looks at to see whether it still moves."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from anabatic.core import child, log

DUMP = signal.SIGUSR2
"""Asks a process for the stacks of its threads."""
BEFORE = -1
"""Step of a process that is not training yet, but reads data or a model, or waits for one that does."""
MEETING = -2
"""Step of a process that waits for all others to join: how long is for whoever has asked for them to say."""
_WIDTH = 12


class Heart:
    """Writes `rank-N.beat`, and `rank-N.stack` when asked for; does nothing without a launcher."""

    def __init__(self) -> None:
        self.step = BEFORE
        self._file: int | None = None

    def open(self) -> None:
        """Show that this process is there, and be ready to tell where it stands."""
        folder = child.reports()
        if folder is None:
            return
        stack = open(folder / f"rank-{log.rank()}.stack", "w", encoding="utf-8")  # noqa: SIM115  (open to the end)
        faulthandler.register(DUMP, file=stack, all_threads=True)
        self._file = os.open(folder / f"rank-{log.rank()}.beat", os.O_WRONLY | os.O_CREAT, 0o600)
        self.beat()

    def beat(self, step: int | None = None) -> None:
        """Say that this process moves; `step` is the last finished one."""
        if step is not None:
            self.step = step
        if self._file is not None:
            os.pwrite(self._file, f"{os.getpid():>{_WIDTH}}{self.step:>{_WIDTH}}".encode(), 0)


HEART = Heart()
"""This process's own."""


def read(path: Path) -> tuple[int, int] | None:
    """Return (process id, last finished step) of a `.beat` file; None when it is not whole yet."""
    text = path.read_text(encoding="utf-8")
    return (int(text[:_WIDTH]), int(text[_WIDTH:])) if len(text) == 2 * _WIDTH else None
