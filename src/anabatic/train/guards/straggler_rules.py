"""Which rank is slow, which link, and which copy of the weights is damaged: rules on figures of all ranks.

In synchronous data parallelism every rank waits for the last one. The slow rank is therefore not the one with the
longest step, which all have, but the one that computes longer than the others while those wait in collectives. A rank
is named only when it was slow in several logged rows in a row: a short disturbance (another program, a garbage
collection) is no fault.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

ROWS_TO_CONFIRM = 3
"""Rows in a row that name a rank, or clear it."""
RELEASE_FRACTION = 0.5
"""Of the excess that names a rank: less than this clears it."""
LINK_RATIO = 3.0
"""A broadcast from one rank takes so many times as long as from the others."""
MIN_MAD_RANKS = 8
"""Ranks from which their spread says what is usual."""
_MAX_MAD_DEVIATIONS = 6.0
_MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to the standard deviation of a normal distribution."""

Cause = Literal["device", "data", "link"]


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured since the last row, in seconds of a step.

    Attributes:
        compute_s: forward and backward pass of a micro-batch, without what waits for other ranks.
        wait_s: what it waited for the gradients of the others after that.
        data_s: what it waited for its own data.
        link_s: a broadcast that it has sent to the others; 0: not measured since the last row.
    """

    compute_s: float
    wait_s: float
    data_s: float
    link_s: float = 0.0


@dataclass(frozen=True)
class StragglerFinding:
    """A rank that has become slow, or is no longer.

    Attributes:
        ratio: its time relative to the median of the ranks.
        is_over: it is as fast as the others again.
    """

    rank: int
    cause: Cause
    ratio: float
    is_over: bool = False


@dataclass
class _Streak:
    """How often in a row something was seen, and whether it is known."""

    slow_rows: int = 0
    normal_rows: int = 0
    cause: Cause | None = None

    def update(self, is_slow: bool, is_normal: bool) -> bool:
        """Count a row; return True when the state has changed: slow now, or no longer."""
        self.slow_rows = self.slow_rows + 1 if is_slow else 0
        self.normal_rows = self.normal_rows + 1 if is_normal else 0
        known = self.cause is not None
        return self.normal_rows >= ROWS_TO_CONFIRM if known else self.slow_rows >= ROWS_TO_CONFIRM


@dataclass(frozen=True)
class _Limit:
    """Seconds of each rank, the usual ones, and those from which a rank is slow."""

    values: list[float]
    usual: float
    most: float

    def get_excess(self, rank: int) -> float:
        return self.values[rank] - self.usual

    def is_released(self, rank: int) -> bool:
        return self.get_excess(rank) < RELEASE_FRACTION * (self.most - self.usual)


@dataclass
class StragglerDetector:
    """Judges row after row; equal on every rank, because all see the same figures.

    Args:
        min_ratio: a rank is slow from so many times the median; more than 1.
        min_link_excess_s: a link is slow from so many seconds more than usual; less are hiccups of the host.
    """

    min_ratio: float
    min_link_excess_s: float
    _ranks: dict[int, _Streak] = field(default_factory=dict)
    _links: dict[int, _Streak] = field(default_factory=dict)
    _first_links: list[list[float]] = field(default_factory=list)

    def judge_row(self, times: Sequence[RankTimes]) -> list[StragglerFinding]:
        """Return what has changed with this row; `times` are those of all ranks, at least two."""
        return [*self._judge_ranks(times), *self._judge_links([each.link_s for each in times])]

    @property
    def slow_ranks(self) -> dict[int, Cause]:
        """The ranks that are slow now, and why; a link only where the rank itself is not."""
        states = [*self._links.items(), *self._ranks.items()]
        return dict(sorted({rank: state.cause for rank, state in states if state.cause is not None}.items()))

    def is_undecided(self, with_ranks: bool) -> bool:
        """Return whether more figures are needed soon to say if a link is slow, or `with_ranks` a rank."""
        states = [*self._links.values(), *(self._ranks.values() if with_ranks else ())]
        return any(state.cause is None and state.slow_rows for state in states) or (
            0 < len(self._first_links) < ROWS_TO_CONFIRM
        )

    def _judge_ranks(self, times: Sequence[RankTimes]) -> list[StragglerFinding]:
        compute = [each.compute_s for each in times]
        if not any(compute):  # not measured
            return []
        base = statistics.median_low(compute)
        causes: dict[Cause, _Limit] = {
            "device": self._find_limit(compute),
            "data": self._find_limit([base + each.data_s for each in times]),
        }
        others_wait = statistics.median_high(each.wait_s for each in times)
        found = []
        for rank, each in enumerate(times):
            state = self._ranks.setdefault(rank, _Streak())
            # What does not keep the others waiting is hidden behind something else, and costs nothing.
            felt = float("inf") if others_wait == 0.0 else 2 * (others_wait - each.wait_s)
            slow: list[tuple[float, Cause]] = [
                (excess, cause)
                for cause, limit in causes.items()
                if (excess := limit.get_excess(rank)) >= limit.most - limit.usual and excess <= felt
            ]
            released = state.cause is not None and causes[state.cause].is_released(rank)
            if state.update(bool(slow), released):
                is_over = state.cause is not None
                cause = state.cause or max(slow)[1]
                state.cause = None if is_over else cause
                ratio = causes[cause].values[rank] / causes[cause].usual
                found.append(StragglerFinding(rank, cause, ratio, is_over))
        return found

    def _find_limit(self, values: list[float]) -> _Limit:
        usual = max(statistics.median_low(values), 1e-9)
        return _Limit(values, usual, max(usual * self.min_ratio, usual + _MAX_MAD_DEVIATIONS * _compute_spread(values)))

    def _judge_links(self, links: Sequence[float]) -> list[StragglerFinding]:
        if not all(seconds > 0 for seconds in links):
            return []
        usual = [statistics.median_low(links)] * len(links)
        if len(links) == 2:  # the two ends of one link are equal: only the time before tells that it is slow now
            if len(self._first_links) < ROWS_TO_CONFIRM:
                self._first_links.append(list(links))
                return []
            usual = [statistics.median(column) for column in zip(*self._first_links, strict=True)]
        found = []
        for rank, (seconds, normal) in enumerate(zip(links, usual, strict=True)):
            state = self._links.setdefault(rank, _Streak())
            is_slow = seconds >= LINK_RATIO * normal and seconds - normal >= self.min_link_excess_s
            released = seconds < 0.5 * (1 + LINK_RATIO) * normal or seconds - normal < 0.5 * self.min_link_excess_s
            if state.update(is_slow, released):
                is_over = state.cause is not None
                state.cause = None if is_over else "link"
                found.append(StragglerFinding(rank, "link", seconds / max(normal, 1e-9), is_over))
        return found


def _compute_spread(values: Sequence[float]) -> float:
    """Robust standard deviation; 0 for so few values that one of them decides it."""
    if len(values) < MIN_MAD_RANKS:
        return 0.0
    middle = statistics.median(values)
    return _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


@dataclass(frozen=True)
class CopyMismatch:
    """Copies of the same weights that differ.

    Attributes:
        ranks: those that differ from most; all of them where no copy has the majority.
        tensor: number of the first tensor that differs.
        has_majority: more ranks agree with one another than differ.
    """

    ranks: list[int]
    tensor: int
    has_majority: bool


def compare_copies(sums: Sequence[Sequence[Hashable]], groups: Sequence[Sequence[int]]) -> CopyMismatch | None:
    """Return which ranks' weights differ from those of the others; None: all are equal.

    Args:
        sums: for each rank, the checksum of each tensor.
        groups: ranks that hold the same part of the model.
    """
    wrong: list[int] = []
    firsts: list[int] = []
    has_majority = True
    for group in groups:
        counts = Counter(tuple(sums[rank]) for rank in group)
        (common, number), *others = counts.most_common()
        if not others:
            continue
        decided = 2 * number > len(group)
        has_majority &= decided
        wrong += [rank for rank in group if not decided or tuple(sums[rank]) != common]
        firsts += [_find_first_difference(common, other) for other, _ in others]
    return CopyMismatch(sorted(wrong), min(firsts), has_majority) if wrong else None


def _find_first_difference(one: Sequence[Hashable], two: Sequence[Hashable]) -> int:
    return next(at for at, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
