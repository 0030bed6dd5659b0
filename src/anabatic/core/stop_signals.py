"""Signals that request a job to stop; repeated signals count as one request.

Slurm and systemd signal every process of a job, and a launcher forwards what it gets: a process receives the same
request several times, in any order. So SIGTERM, SIGHUP and SIGUSR1 count once and never end a job without saving. Only
a second Ctrl-C that is typed clearly later, or SIGKILL, does.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from anabatic.core import log, relaunch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that request a stop."""
SECOND_SIGINT_SECONDS = 2.0
"""Minimum seconds between two SIGINTs for the second to count as a new request and not as a copy of the first."""
FIRST_SIGNAL, REPEATED_SIGNAL, STOP_NOW = "first", "again", "now"
"""Meaning of a signal: stop; no new request; end without saving."""
_GRACE_SECONDS = 5.0
"""Seconds that a process with nothing to save has to handle a signal: compilers and networks may block it."""


class StopSignal(BaseException):
    """A stop signal arrived before there was anything to save."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.number = signum

    @property
    def exit_code(self) -> int:
        """Exit code of the process."""
        return get_exit_code(self.number)


def get_exit_code(signum: int) -> int:
    """Return the exit code of a job that ended because of this signal."""
    return relaunch.EXIT_INTERRUPTED if signum == signal.SIGINT else relaunch.EXIT_PREEMPTED


def is_supervised() -> bool:
    """Return whether this process is a worker of a launcher or a stage of a pipeline."""
    return relaunch.REPORTS_VARIABLE in os.environ or relaunch.SUPERVISED_VARIABLE in os.environ


class StopRequest:
    """Classifies signals as they arrive.

    Args:
        supervised: a parent process decides when to end without saving, so a SIGINT never does here.
        now: clock, in seconds.
    """

    def __init__(self, supervised: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self.first_signal = 0
        """The first signal; 0: none arrived."""
        self._supervised, self._now = supervised, now
        self._interrupted: float | None = None

    def classify_signal(self, signum: int) -> str:
        """Return the meaning of a signal: FIRST_SIGNAL, REPEATED_SIGNAL or STOP_NOW."""
        if signum == signal.SIGINT:
            if self._interrupted is None:
                self._interrupted = self._now()
            elif not self._supervised and self._now() - self._interrupted >= SECOND_SIGINT_SECONDS:
                return STOP_NOW
        if self.first_signal:
            return REPEATED_SIGNAL
        self.first_signal = signum
        return FIRST_SIGNAL


class SignalListener:
    """Handles stop signals of this process: ends it while there is nothing to save, and defers them later."""

    def __init__(self) -> None:
        self._stop_request = StopRequest()
        self._on_stop: Callable[[int], None] | None = None
        self.is_stopped = False
        """True if a signal arrived before there was anything to save."""
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def start_listening(self, watch: bool = True) -> None:
        """Listen until the process ends: a signal raises `StopSignal`, Ctrl-C raises KeyboardInterrupt.

        Args:
            watch: end the process after a few seconds if its main thread is blocked in a library.
        """
        if not self._is_listening() and _in_main_thread():
            self._install_handlers()
            if watch:
                self._start_watching()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # pending ones are delivered

    @contextmanager
    def defer_signals(self, on_signal: Callable[[int], None]) -> Iterator[None]:
        """Report signals once to `on_signal` instead of ending the process.

        A process that already listens ignores signals afterwards. Only a second Ctrl-C still raises KeyboardInterrupt.
        """
        if not _in_main_thread():
            yield
            return
        installed_here = not self._is_listening()
        if installed_here:
            self._install_handlers()
        self._on_stop = on_signal
        if self._stop_request.first_signal:
            on_signal(self._stop_request.first_signal)
        try:
            yield
        finally:
            if installed_here:
                self._restore_handlers()
            else:
                self._on_stop = _ignore_signal

    def hold_signals(self) -> None:
        """Ignore all further signals: for the time in which the process reports how it ended, and ends."""
        if self._on_stop is None:
            self._on_stop = _ignore_signal

    def _is_listening(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle_signal

    def _install_handlers(self) -> None:
        self._stop_request = StopRequest(supervised=is_supervised())
        self._previous_handlers, self._on_stop = {}, None
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup ignores it
                self._previous_handlers[signum] = signal.signal(signum, self._handle_signal)

    def _restore_handlers(self) -> None:
        self._on_stop = None
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        action = self._stop_request.classify_signal(signum)
        if action == STOP_NOW:
            raise KeyboardInterrupt
        if action == FIRST_SIGNAL and self._on_stop is not None:
            self._on_stop(signum)
        elif action == FIRST_SIGNAL:
            self.is_stopped = True
            raise KeyboardInterrupt if signum == signal.SIGINT else StopSignal(signum)

    def _start_watching(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch_signals, args=(read_fd,), name="stopping", daemon=True).start()

    def _watch_signals(self, read_fd: int) -> None:
        while True:
            received = [signum for signum in os.read(read_fd, 64) if signum in STOP_SIGNALS]
            if not received or self._on_stop is not None:
                continue
            time.sleep(_GRACE_SECONDS)
            if self._on_stop is None and self._is_listening():
                code = get_exit_code(self._stop_request.first_signal or received[0])
                relaunch.write_exit_code(code, log.get_rank())
                os._exit(code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ignore_signal(signum: int) -> None:
    """Do nothing: the current work is what a stop would wait for."""


SIGNAL_LISTENER = SignalListener()
"""The listener of this process."""
