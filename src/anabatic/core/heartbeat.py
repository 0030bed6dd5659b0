"""The heartbeat of a training process: a small file that its launcher reads to detect a hang."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from anabatic.core import log, relaunch

DUMP_SIGNAL = signal.SIGUSR2
"""Signal that makes a process dump the stacks of its threads."""
STEP_NOT_TRAINING = -1
"""Step of a process that is not training yet: it loads data or a model, or waits for a process that does."""
STEP_JOINING = -2
"""Step of a process that waits for all others to join; the caller of the rendezvous sets the timeout."""
_FIELD_WIDTH = 12


class Heartbeat:
    """Writes `rank-N.beat`, and `rank-N.stack` on request; does nothing without a launcher."""

    def __init__(self) -> None:
        self.step = STEP_NOT_TRAINING
        self.is_open = False
        """A launcher reads the file: whoever beats often asks first."""
        self._file = -1

    def open(self) -> None:
        """Write the first beat and register the handler that dumps stacks."""
        folder = relaunch.get_reports_folder()
        if folder is None:
            return
        stack = open(folder / f"rank-{log.get_rank()}.stack", "w", encoding="utf-8")  # noqa: SIM115  (open until exit)
        faulthandler.register(DUMP_SIGNAL, file=stack, all_threads=True)
        self._file = os.open(folder / f"rank-{log.get_rank()}.beat", os.O_WRONLY | os.O_CREAT, 0o600)
        self.is_open = True
        self.record_beat()

    def record_beat(self, step: int | None = None) -> None:
        """Record progress; `step` is the last finished one."""
        if step is not None:
            self.step = step
        if self.is_open:
            os.pwrite(self._file, f"{os.getpid():>{_FIELD_WIDTH}}{self.step:>{_FIELD_WIDTH}}".encode(), 0)


HEARTBEAT = Heartbeat()
"""The heartbeat of this process."""


def read_heartbeat(path: Path) -> tuple[int, int] | None:
    """Return (process id, last finished step) of a `.beat` file; None if it is incomplete."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return (int(text[:_FIELD_WIDTH]), int(text[_FIELD_WIDTH:])) if len(text) == 2 * _FIELD_WIDTH else None
    except ValueError:
        return None
