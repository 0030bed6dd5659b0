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

from anabatic.core import child, log

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Those that ask."""
LATER = 2.0
"""Seconds between two SIGINTs from which on the second is a wish of its own, and no copy of the first."""
FIRST, AGAIN, NOW = "first", "again", "now"
"""What a signal means: stop; nothing new; end without saving."""
_PATIENCE = 5.0
"""Seconds that a process which has nothing to save yet may need to see a signal: compilers and networks keep it."""


class Stopped(BaseException):
    """A signal came before there was anything to save."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code."""
        return code_of(self.number)


def code_of(number: int) -> int:
    """Return the exit code of a job that this signal has ended."""
    return child.INTERRUPTED if number == signal.SIGINT else child.PREEMPTED


class Wish:
    """Judges signals as they come.

    Args:
        supervised: somebody above decides when to end at once, so no SIGINT does here.
        now: a clock in seconds.
    """

    def __init__(self, supervised: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self.number = 0
        """The first signal; 0: none came."""
        self._supervised, self._now = supervised, now
        self._interrupted: float | None = None

    def take(self, number: int) -> str:
        """Return what this one means: FIRST, AGAIN or NOW."""
        if number == signal.SIGINT:
            if self._interrupted is None:
                self._interrupted = self._now()
            elif not self._supervised and self._now() - self._interrupted >= LATER:
                return NOW
        if self.number:
            return AGAIN
        self.number = number
        return FIRST


class Listener:
    """Hears signals for this process: ends it while there is nothing to save, and remembers them afterwards."""

    def __init__(self) -> None:
        self._wish = Wish()
        self._tell: Callable[[int], None] | None = None
        self.ended = False
        """True when a signal came before anything could be saved."""
        self._old: dict[signal.Signals, Any] = {}

    def start(self, watches: bool = True) -> None:
        """Listen to the end of the process; from here on a signal raises `Stopped`, Ctrl-C KeyboardInterrupt.

        Args:
            watches: a main thread that is held in a library is not waited for longer than a few seconds.
        """
        if not self._listens() and _in_main_thread():
            self._install()
            if watches:
                self._begin_watch()
        child.admit_signals()

    @contextmanager
    def deferred(self, tell: Callable[[int], None]) -> Iterator[None]:
        """What came and comes is told once, and ends nothing; a process that listens keeps it so afterwards.

        Only the second Ctrl-C still raises KeyboardInterrupt.
        """
        if not _in_main_thread():
            yield
            return
        own = not self._listens()
        if own:
            self._install()
        self._tell = tell
        if self._wish.number:
            tell(self._wish.number)
        try:
            yield
        finally:
            if own:
                self._uninstall()
            else:
                self._tell = _remember

    def hold(self) -> None:
        """Let no signal interrupt what is done from here on: an error that is being told, after which this ends."""
        if self._tell is None:
            self._tell = _remember

    def _listens(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._receive

    def _install(self) -> None:
        self._wish = Wish(supervised=child.is_supervised())
        self._old, self._tell = {}, None
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                self._old[number] = signal.signal(number, self._receive)

    def _uninstall(self) -> None:
        self._tell = None
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        what = self._wish.take(number)
        if what == NOW:
            raise KeyboardInterrupt
        if what == FIRST and self._tell is not None:
            self._tell(number)
        elif what == FIRST:
            self.ended = True
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    def _begin_watch(self) -> None:
        waken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(waken,), name="stopping", daemon=True).start()

    def _watch(self, waken: int) -> None:
        while True:
            asked = [number for number in os.read(waken, 64) if number in SIGNALS]
            if not asked or self._tell is not None:
                continue
            time.sleep(_PATIENCE)
            if self._tell is None and self._listens():
                code = code_of(self._wish.number or asked[0])
                child.tell_end(code, log.rank())
                os._exit(code)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _remember(number: int) -> None:
    """Do nothing: what is done now is what a stop would wait for."""


LISTENER = Listener()
"""This process's own."""
