"""One child at a time, with our Ctrl-C and SIGTERM passed on to it.

The child has its own session, so that a signal from the terminal reaches it once, through us, and not twice:
it then saves and leaves. A second Ctrl-C, typed clearly later, kills it with all that it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType
from typing import Any

import psutil

from anabatic.core import child, log
from anabatic.core.errors import Failure
from anabatic.core.stopping import FIRST, NOW, SIGNALS, Wish


class StageProcess:
    """Context manager that holds the signal handlers; `run` starts a child and waits for it."""

    def __init__(self, program: Sequence[str]) -> None:
        self.program = list(program)
        self.interrupted = 0
        """128 + the first signal we received; 0 when none came."""
        self._wish = Wish(supervised=child.is_supervised())
        self._told = False
        self._child: subprocess.Popen[bytes] | None = None
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StageProcess:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: so do we
                self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def run(self, arguments: Sequence[str]) -> int:
        """Run `program arguments` with its output going straight through; return its exit code.

        A child killed by a signal has 128 + the signal, as shells count.

        Raises:
            Failure: the program cannot be started.
        """
        if self.interrupted:
            return self.interrupted
        try:
            self._child = subprocess.Popen(
                [*self.program, *arguments],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**child.environment(), child.SUPERVISED: "1"},
            )
        except OSError as error:
            hint = "is the environment whole?"
            raise Failure(f"cannot start {self.program[0]}: {error.strerror}", hint) from error
        self._pass_on()  # a signal may have come between the test above and the start
        code = self._child.wait()
        self._child = None
        return code if code >= 0 else 128 - code

    def _receive(self, number: int, frame: FrameType | None) -> None:
        what = self._wish.take(number)
        if what == NOW and self._child is not None and self._child.poll() is None:
            for one in psutil.Process(self._child.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            os.killpg(self._child.pid, signal.SIGKILL)
        if what != FIRST:
            return
        self.interrupted = 128 + number
        if self._child is not None:
            log.info(f"{signal.Signals(number).name}: waiting for the stage to save; a second Ctrl-C kills it")
        self._pass_on()

    def _pass_on(self) -> None:
        """Send the first signal we got to the child, once (`Popen.send_signal` spares one that has ended)."""
        if self.interrupted and self._child is not None and not self._told:
            self._told = True
            number = self.interrupted - 128
            self._child.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
