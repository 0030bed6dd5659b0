"""Signals that ask a job to stop: any number of them is one wish, whoever else of the job gets them as well.

Slurm and systemd signal every process of a job, and a launcher hands on what it gets: the same wish reaches a process
several times, in any order. So SIGTERM, SIGHUP and SIGUSR1 count once and never end a job without saving. What does is
a second Ctrl-C that a person has typed clearly later, and SIGKILL.
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
"""Those that ask."""
SECOND_SIGINT_SECONDS = 2.0
"""Seconds between two SIGINTs from which on the second is a wish of its own, and no copy of the first."""
FIRST_SIGNAL, REPEATED_SIGNAL, STOP_NOW = "first", "again", "now"
"""What a signal means: stop; nothing new; end without saving."""
_GRACE_SECONDS = 5.0
"""Seconds that a process which has nothing to save yet may need to see a signal: compilers and networks keep it."""


class StopSignal(BaseException):
    """A signal came before there was anything to save."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code."""
        return get_exit_code(self.number)


def get_exit_code(number: int) -> int:
    """Return the exit code of a job that this signal has ended."""
    return relaunch.EXIT_INTERRUPTED if number == signal.SIGINT else relaunch.EXIT_PREEMPTED


class StopRequest:
    """Judges signals as they come.

    Args:
        supervised: somebody above decides when to end at once, so no SIGINT does here.
        now: a clock in seconds.
    """

    def __init__(self, supervised: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self.first_signal = 0
        """The first signal; 0: none came."""
        self._supervised, self._now = supervised, now
        self._interrupted: float | None = None

    def classify_signal(self, number: int) -> str:
        """Return what this one means: FIRST, AGAIN or NOW."""
        if number == signal.SIGINT:
            if self._interrupted is None:
                self._interrupted = self._now()
            elif not self._supervised and self._now() - self._interrupted >= SECOND_SIGINT_SECONDS:
                return STOP_NOW
        if self.first_signal:
            return REPEATED_SIGNAL
        self.first_signal = number
        return FIRST_SIGNAL


class SignalListener:
    """Hears signals for this process: ends it while there is nothing to save, and remembers them afterwards."""

    def __init__(self) -> None:
        self._stop_request = StopRequest()
        self._on_stop: Callable[[int], None] | None = None
        self.is_stopped = False
        """True when a signal came before anything could be saved."""
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def start_listening(self, watches: bool = True) -> None:
        """Listen to the end of the process; from here on a signal raises `StopSignal`, Ctrl-C KeyboardInterrupt.

        Args:
            watches: a main thread that is held in a library is not waited for longer than a few seconds.
        """
        if not self._is_listening() and _in_main_thread():
            self._install_handlers()
            if watches:
                self._start_watching()
        relaunch.unblock_group_signals()

    @contextmanager
    def defer_signals(self, tell: Callable[[int], None]) -> Iterator[None]:
        """What came and comes is reported once, and ends nothing; a process that listens keeps it so afterwards.

        Only the second Ctrl-C still raises KeyboardInterrupt.
        """
        if not _in_main_thread():
            yield
            return
        own = not self._is_listening()
        if own:
            self._install_handlers()
        self._on_stop = tell
        if self._stop_request.first_signal:
            tell(self._stop_request.first_signal)
        try:
            yield
        finally:
            if own:
                self._restore_handlers()
            else:
                self._on_stop = _ignore_signal

    def hold_signals(self) -> None:
        """Let no signal interrupt what is done from here on: an error that is being told, after which this ends."""
        if self._on_stop is None:
            self._on_stop = _ignore_signal

    def _is_listening(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle_signal

    def _install_handlers(self) -> None:
        self._stop_request = StopRequest(supervised=relaunch.is_supervised())
        self._previous_handlers, self._on_stop = {}, None
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                self._previous_handlers[number] = signal.signal(number, self._handle_signal)

    def _restore_handlers(self) -> None:
        self._on_stop = None
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        what = self._stop_request.classify_signal(number)
        if what == STOP_NOW:
            raise KeyboardInterrupt
        if what == FIRST_SIGNAL and self._on_stop is not None:
            self._on_stop(number)
        elif what == FIRST_SIGNAL:
            self.is_stopped = True
            raise KeyboardInterrupt if number == signal.SIGINT else StopSignal(number)

    def _start_watching(self) -> None:
        waken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        threading.Thread(target=self._watch_signals, args=(waken,), name="stopping", daemon=True).start()

    def _watch_signals(self, waken: int) -> None:
        while True:
            asked = [number for number in os.read(waken, 64) if number in STOP_SIGNALS]
            if not asked or self._on_stop is not None:
                continue
            time.sleep(_GRACE_SECONDS)
            if self._on_stop is None and self._is_listening():
                code = get_exit_code(self._stop_request.first_signal or asked[0])
                relaunch.write_exit_code(code, log.get_rank())
                os._exit(code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ignore_signal(number: int) -> None:
    """Do nothing: what is done now is what a stop would wait for."""


SIGNAL_LISTENER = SignalListener()
"""This process's own."""
