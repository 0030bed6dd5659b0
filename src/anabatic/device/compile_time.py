"""A clock that stands still while torch.compile works, so that compiling does not count as training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class CompileClock:
    """Seconds of a clock without those that torch.compile has taken in this process."""

    _clock: Callable[[], float] = time.perf_counter
    _compiling: float = 0.0
    _started_at: float | None = None
    _depth: int = 0
    is_watching: bool = False
    """Something is compiled in this process."""

    def watch_compiling(self) -> None:
        """Listen to torch from now on (`torch/_dynamo/callback.py`); once is enough."""
        if self.is_watching:
            return
        from torch._dynamo.callback import callback_handler  # costs half a second where nothing is compiled

        callback_handler.register_start_callback(self.start)
        callback_handler.register_end_callback(self.stop)
        self.is_watching = True

    def start(self, *facts: object) -> None:
        """Stop counting. `facts`: what torch passes about the compilation, nothing before torch 2.8."""
        self._depth += 1
        if self._depth == 1:  # before torch 2.8, compilations inside another one call too
            self._started_at = self._clock()

    def stop(self, *facts: object) -> None:
        """Count again, once every compilation that has started is over."""
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._started_at is not None:
            self._compiling += self._clock() - self._started_at
            self._started_at = None

    def read_compiling(self) -> float:
        """Return the seconds of compiling so far."""
        return self._compiling + (0.0 if self._started_at is None else self._clock() - self._started_at)

    def read(self) -> float:
        """Return a time in seconds whose differences leave compiling out."""
        now = self._clock()
        started_at = self._started_at
        return (now if started_at is None else started_at) - self._compiling


COMPILE_CLOCK = CompileClock()
"""Of this process: torch's callbacks are the process's, too."""
