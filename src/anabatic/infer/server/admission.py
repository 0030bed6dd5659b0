"""Who may still wait: the queue of each engine has an end, and whoever comes behind it is told when to ask again."""

from __future__ import annotations

import math
import time
from collections import Counter, deque

from anabatic.core import log
from anabatic.infer.engine import Engine
from anabatic.infer.server.errors import ApiError

_REMEMBERED = 64
_LONGEST_PAUSE = 60
_QUIET_SECONDS = 10.0
"""Between two lines of the log about a full queue."""


class Admission:
    """Counts requests from the moment they are let in, before the engine's thread has seen them. One loop's alone.

    Args:
        most: requests of an engine that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: Counter[Engine] = Counter()
        self._left: dict[Engine, deque[float]] = {}
        self._refused, self._told = 0, -math.inf

    def enter(self, engine: Engine, count: int) -> None:
        """Let requests in.

        Raises:
            ApiError: 429, too many wait already.
        """
        waiting = max(0, self._inside[engine] - engine.load().running)
        if waiting + count > self._most:
            raise self._full(engine, waiting)
        self._inside[engine] += count

    def leave(self, engine: Engine, count: int) -> None:
        """The requests are over, however they ended."""
        self._inside[engine] -= count
        self._left.setdefault(engine, deque(maxlen=_REMEMBERED)).extend([time.monotonic()] * count)

    def _full(self, engine: Engine, waiting: int) -> ApiError:
        self._refused += 1
        now = time.monotonic()
        if now - self._told > _QUIET_SECONDS:
            hint = "raise limits.queue or batching.batch, or serve it twice"
            log.warn(f"the queue is full: {waiting} requests wait, {self._refused} were refused ({hint})")
            self._refused, self._told = 0, now
        error = ApiError(429, f"{waiting} requests wait already; try again soon", None, "queue_full")
        error.retry_after = self._pause(engine, waiting, now)
        return error

    def _pause(self, engine: Engine, waiting: int, now: float) -> int:
        """Return the seconds in which half of those who wait will have left, as fast as the latest ones did."""
        left = self._left.get(engine)
        if not left:
            return 1
        rate = len(left) / max(now - left[0], 1e-3)
        return min(_LONGEST_PAUSE, max(1, math.ceil(waiting / 2 / rate)))
