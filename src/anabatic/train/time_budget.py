"""`schedule.minutes`: the number of steps follows from the time that they take."""

from __future__ import annotations

import math

from anabatic.core.formatting import format_duration
from anabatic.parallel.collectives import broadcast_text
from anabatic.parallel.world import World

SETTLED_SHARE = 0.9
"""Share of the time after which the number of steps stays: the last steps of a decay are not counted anew."""
_NEWEST_WEIGHT = 0.5
"""Of the newest row in the mean time of a step; the machine may have become slower or faster."""


class TimeBudget:
    """Fits the steps of a run into a time, from what the logged rows took.

    The learning rate follows the share of the steps, so it decays to its end whatever their number becomes.
    """

    def __init__(self, minutes: float) -> None:
        self.seconds = 60.0 * minutes
        self._seconds_per_step = math.nan
        self._num_rows = 0

    @staticmethod
    def is_early_row(step: int) -> bool:
        """Return whether a step (from 1) is logged whatever `log.every` is: 1, 2, 4, 8, 16."""
        return step <= 16 and step & (step - 1) == 0

    def count_steps(self, total: int, step: int, elapsed: float, row_steps: int, row_seconds: float) -> int:
        """Return the steps of the run.

        Args:
            total: steps of the run by the last count.
            step: steps done.
            elapsed: seconds of training, those before a continuation included.
            row_steps, row_seconds: steps since the last row, and what they took.
        """
        if row_steps <= 0 or elapsed >= SETTLED_SHARE * self.seconds and self._num_rows > 1:
            return total
        newest = row_seconds / row_steps
        # The first step of a process also allocates: it neither counts in the mean nor may end the run.
        least = 1 if self._num_rows else 2
        weight = _NEWEST_WEIGHT if self._num_rows > 1 else 1.0
        self._seconds_per_step = newest if weight == 1.0 else weight * newest + (1 - weight) * self._seconds_per_step
        self._num_rows += 1
        left = max(0.0, self.seconds - elapsed)
        return step + max(least, round(left / max(self._seconds_per_step, 1e-9)))

    def describe(self, total: int, step: int, elapsed: float, max_steps: int | None = None) -> str:
        """Return one line for the log: what is done and what is left make up the time.

        Args:
            total: steps by the last count.
            step: steps done, in `elapsed` seconds of training.
            max_steps: `schedule.max_steps`.
        """
        is_longer = elapsed + (total - step) * self._seconds_per_step > self.seconds + self._seconds_per_step
        verb = "take longer than" if is_longer else "fit into"
        text = f"{total:,} steps {verb} {format_duration(self.seconds)} of training: {step:,} done in"
        text += f" {format_duration(elapsed)}, {total - step:,} of {self._seconds_per_step:.3g} s left"
        if max_steps is not None and max_steps < total:
            text += f"; schedule.max_steps ends the run earlier, after {max_steps:,}"
        return text


def agree_on_steps(total: int, world: World) -> int:
    """Return rank 0's number of steps on every rank: clocks differ."""
    return total if world.size == 1 else int(broadcast_text(str(total), world))
