"""Admission control (rate limit): engine queues are bounded; further requests get 429 and the time to retry after."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from anabatic.core import log
from anabatic.infer.engine import Engine
from anabatic.infer.server.api_errors import ApiError

_REMEMBERED_DEPARTURES = 64
_MAX_RETRY_SECONDS = 60
_WARN_INTERVAL_SECONDS = 10.0
"""Between two lines of the log about a full queue."""


class _EngineQueue:
    """The requests of one engine, and how fast they leave when all its places are taken.

    Only work counts: the seconds that each of the places was taken, so that neither pauses nor single requests look
    like a slow engine.

    Attributes:
        num_inside: requests, waiting or running.
    """

    def __init__(self, places: int, now: float) -> None:
        self.num_inside = 0
        self._max_batch, self._updated_at = places, now
        self._work_seconds = 0.0
        self._work_at_departures: deque[float] = deque(
            [0.0], maxlen=_REMEMBERED_DEPARTURES
        )  # work done when each of them left

    def change_count(self, by: int, now: float) -> None:
        """Requests come, or leave."""
        self._account_work(now)
        self.num_inside += by
        self._work_at_departures.extend([self._work_seconds] * -by)

    def departure_rate(self, now: float) -> float | None:
        """Return the requests that leave in a second when there is enough to do; None: none has left so far."""
        self._account_work(now)
        work = self._work_seconds - self._work_at_departures[0]
        return (
            self._max_batch * (len(self._work_at_departures) - 1) / max(work, 1e-3)
            if len(self._work_at_departures) > 1
            else None
        )

    def _account_work(self, now: float) -> None:
        self._work_seconds += min(self.num_inside, self._max_batch) * (now - self._updated_at)
        self._updated_at = now


class AdmissionControl:
    """Counts requests from the moment they are let in, before the engine's thread has seen them. One loop's alone.

    Args:
        most: requests of an engine that may wait.
        clock: tells the time, in seconds.
    """

    def __init__(self, max_requests: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_waiting, self._clock = max_requests, clock
        self._queues: dict[Engine, _EngineQueue] = {}
        self._refused, self._warned_at = 0, -math.inf

    def admit_requests(self, engine: Engine, count: int) -> None:
        """Let requests in.

        Raises:
            ApiError: 429, too many wait already.
        """
        line = self._engine_queue(engine)
        waiting = max(0, line.num_inside - engine.get_load().running)
        if waiting + count > self._max_waiting:
            raise self._queue_full_error(line, waiting)
        line.change_count(count, self._clock())

    def release_requests(self, engine: Engine, count: int) -> None:
        """The requests are over, however they ended."""
        self._engine_queue(engine).change_count(-count, self._clock())

    def _engine_queue(self, engine: Engine) -> _EngineQueue:
        if engine not in self._queues:
            self._queues[engine] = _EngineQueue(engine.max_batch, self._clock())
        return self._queues[engine]

    def _queue_full_error(self, line: _EngineQueue, waiting: int) -> ApiError:
        self._refused += 1
        now = self._clock()
        if now - self._warned_at > _WARN_INTERVAL_SECONDS:
            hint = "raise limits.queue or batching.batch, or serve it twice"
            log.warn(
                f"the queue is full: {waiting} requests wait, refused since the last warning: {self._refused} ({hint})"
            )
            self._refused, self._warned_at = 0, now
        error = ApiError(429, f"{waiting} requests wait already; try again soon", None, "queue_full")
        error.retry_after = _retry_seconds(line.departure_rate(now), waiting)
        return error


def _retry_seconds(rate: float | None, waiting: int) -> int:
    """Return the seconds in which half of those who wait will have left, as fast as the latest ones did."""
    return 1 if rate is None else min(_MAX_RETRY_SECONDS, max(1, math.ceil(waiting / 2 / rate)))
