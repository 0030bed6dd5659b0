"""Who may still wait: the queue of each engine has an end, and whoever comes behind it is told when to ask again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from anabatic.core import log
from anabatic.infer.engine import Engine
from anabatic.infer.server.errors import ApiError

_REMEMBERED = 64
_LONGEST_PAUSE = 60
_QUIET_SECONDS = 10.0
"""Between two lines of the log about a full queue."""


class _Line:
    """The requests of one engine, and how fast they leave when all its places are taken.

    Only work counts: the seconds that each of the places was taken, so that neither pauses nor single requests look
    like a slow engine.

    Attributes:
        inside: requests, waiting or running.
    """

    def __init__(self, places: int, now: float) -> None:
        self.inside = 0
        self._places, self._at = places, now
        self._worked = 0.0
        self._left: deque[float] = deque([0.0], maxlen=_REMEMBERED)  # work done when each of them left

    def change(self, by: int, now: float) -> None:
        """Requests come, or leave."""
        self._work(now)
        self.inside += by
        self._left.extend([self._worked] * -by)

    def rate(self, now: float) -> float | None:
        """Return the requests that leave in a second when there is enough to do; None: none has left so far."""
        self._work(now)
        work = self._worked - self._left[0]
        return self._places * (len(self._left) - 1) / max(work, 1e-3) if len(self._left) > 1 else None

    def _work(self, now: float) -> None:
        self._worked += min(self.inside, self._places) * (now - self._at)
        self._at = now


class Admission:
    """Counts requests from the moment they are let in, before the engine's thread has seen them. One loop's alone.

    Args:
        most: requests of an engine that may wait.
        clock: tells the time, in seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._lines: dict[Engine, _Line] = {}
        self._refused, self._told = 0, -math.inf

    def enter(self, engine: Engine, count: int) -> None:
        """Let requests in.

        Raises:
            ApiError: 429, too many wait already.
        """
        line = self._line(engine)
        waiting = max(0, line.inside - engine.load().running)
        if waiting + count > self._most:
            raise self._full(line, waiting)
        line.change(count, self._clock())

    def leave(self, engine: Engine, count: int) -> None:
        """The requests are over, however they ended."""
        self._line(engine).change(-count, self._clock())

    def _line(self, engine: Engine) -> _Line:
        if engine not in self._lines:
            self._lines[engine] = _Line(engine.max_batch, self._clock())
        return self._lines[engine]

    def _full(self, line: _Line, waiting: int) -> ApiError:
        self._refused += 1
        now = self._clock()
        if now - self._told > _QUIET_SECONDS:
            hint = "raise limits.queue or batching.batch, or serve it twice"
            log.warn(
                f"the queue is full: {waiting} requests wait, refused since the last warning: {self._refused} ({hint})"
            )
            self._refused, self._told = 0, now
        error = ApiError(429, f"{waiting} requests wait already; try again soon", None, "queue_full")
        error.retry_after = _pause(line.rate(now), waiting)
        return error


def _pause(rate: float | None, waiting: int) -> int:
    """Return the seconds in which half of those who wait will have left, as fast as the latest ones did."""
    return 1 if rate is None else min(_LONGEST_PAUSE, max(1, math.ceil(waiting / 2 / rate)))
