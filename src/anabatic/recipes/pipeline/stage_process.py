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

from anabatic.core import log, relaunch
from anabatic.core.errors import Failure
from anabatic.core.stop_signals import FIRST_SIGNAL, STOP_NOW, STOP_SIGNALS, StopRequest


class StageProcess:
    """Context manager that holds the signal handlers; `run` starts a child and waits for it."""

    def __init__(self, program: Sequence[str]) -> None:
        self.program = list(program)
        self.exit_code_if_interrupted = 0
        """128 + the first signal we received; 0 when none came."""
        self._stop_request = StopRequest(supervised=relaunch.is_supervised())
        self._signal_forwarded = False
        self._child_process: subprocess.Popen[bytes] | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StageProcess:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: so do we
                self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def run(self, arguments: Sequence[str]) -> int:
        """Run `program arguments` with its output going straight through; return its exit code.

        A child killed by a signal has 128 + the signal, as shells count.

        Raises:
            Failure: the program cannot be started.
        """
        if self.exit_code_if_interrupted:
            return self.exit_code_if_interrupted
        try:
            self._child_process = subprocess.Popen(
                [*self.program, *arguments],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**relaunch.build_child_environment(), relaunch.SUPERVISED_VARIABLE: "1"},
            )
        except OSError as error:
            hint = "is the environment whole?"
            raise Failure(f"cannot start {self.program[0]}: {error.strerror}", hint) from error
        self._forward_signal()  # a signal may have come between the test above and the start
        code = self._child_process.wait()
        self._child_process = None
        return code if code >= 0 else 128 - code

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        what = self._stop_request.classify_signal(number)
        if what == STOP_NOW and self._child_process is not None and self._child_process.poll() is None:
            for one in psutil.Process(self._child_process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            os.killpg(self._child_process.pid, signal.SIGKILL)
        if what != FIRST_SIGNAL:
            return
        self.exit_code_if_interrupted = 128 + number
        if self._child_process is not None:
            log.info(f"{signal.Signals(number).name}: waiting for the stage to save; a second Ctrl-C kills it")
        self._forward_signal()

    def _forward_signal(self) -> None:
        """Send the first signal we got to the child, once (`Popen.send_signal` spares one that has ended)."""
        if self.exit_code_if_interrupted and self._child_process is not None and not self._signal_forwarded:
            self._signal_forwarded = True
            number = self.exit_code_if_interrupted - 128
            self._child_process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
