"""The rules that name a slow rank, a slow link or a damaged copy, on given figures."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as some

from anabatic.train.guards.straggler_rules import (
    ROWS_TO_CONFIRM,
    RankTimes,
    StragglerDetector,
    StragglerFinding,
    compare_copies,
)

LIMITS = (1.25, 1e-3)


def synchronous(
    compute: Sequence[float], data: Sequence[float] | None = None, link: Sequence[float] = ()
) -> list[RankTimes]:
    """Ranks that all wait for the last one, as collectives make them."""
    data = data or [0.0] * len(compute)
    link = link or [0.0] * len(compute)
    last = max(one + two for one, two in zip(compute, data, strict=True))
    return [
        RankTimes(own, last - own - fed + 0.002, fed, sent) for own, fed, sent in zip(compute, data, link, strict=True)
    ]


def judge(detector: StragglerDetector, rows: int, times: Sequence[RankTimes]) -> list[StragglerFinding]:
    return [finding for _ in range(rows) for finding in detector.judge_row(times)]


@given(
    some.integers(2, 64).flatmap(
        lambda size: some.tuples(
            some.lists(some.floats(0.95, 1.05), min_size=size, max_size=size), some.integers(0, size - 1)
        )
    ),
    some.floats(1.6, 100.0),
    some.floats(1e-4, 100.0),
)
def test_the_slow_device_is_named_once_and_cleared(ranks: tuple[list[float], int], factor: float, scale: float) -> None:
    shares, slow = ranks
    usual = [scale * share for share in shares]
    bad = [value * (factor if rank == slow else 1.0) for rank, value in enumerate(usual)]
    detector = StragglerDetector(*LIMITS)
    assert judge(detector, 5, synchronous(usual)) == []
    assert judge(detector, ROWS_TO_CONFIRM - 1, synchronous(bad)) == []
    (found,) = judge(detector, 10, synchronous(bad))
    assert (found.rank, found.cause, found.is_over) == (slow, "device", False)
    assert detector.slow_ranks == {slow: "device"}
    (over,) = judge(detector, 10, synchronous([scale] * len(usual)))
    assert (over.rank, over.is_over) == (slow, True) and detector.slow_ranks == {}


@given(some.lists(some.lists(some.floats(0.92, 1.08), min_size=8, max_size=8), min_size=1, max_size=40))
def test_ranks_within_the_usual_spread_are_not_named(rows: list[list[float]]) -> None:
    detector = StragglerDetector(*LIMITS)
    assert [finding for row in rows for finding in detector.judge_row(synchronous(row))] == []


@given(some.lists(some.integers(0, 3), min_size=3, max_size=60))
def test_a_disturbance_that_moves_from_rank_to_rank_is_no_fault(slow: list[int]) -> None:
    detector = StragglerDetector(*LIMITS)
    for number, rank in enumerate(slow):
        rank = rank if number < 2 or not rank == slow[number - 1] == slow[number - 2] else (rank + 1) % 4
        slow[number] = rank
        times = synchronous([3.0 if other == rank else 1.0 for other in range(4)])
        assert detector.judge_row(times) == []


def test_a_rank_that_waits_for_its_data_is_named_with_that_cause() -> None:
    (found,) = judge(StragglerDetector(*LIMITS), 4, synchronous([1.0, 1.0, 1.0], [0.01, 2.0, 0.02]))
    assert (found.rank, found.cause) == (1, "data")


def test_what_no_other_rank_waits_for_is_not_named() -> None:
    hidden = [RankTimes(1.0, 0.002, 0.0), RankTimes(1.0, 0.002, 0.9), RankTimes(1.0, 0.002, 0.0)]
    assert judge(StragglerDetector(*LIMITS), 10, hidden) == []


def test_a_slow_device_is_named_although_others_wait_for_data_behind_it() -> None:
    times = [RankTimes(1.0, 4.3, 4.2), RankTimes(4.6, 0.2, 0.5), RankTimes(1.0, 4.3, 5.1), RankTimes(1.0, 4.3, 5.1)]
    (found,) = judge(StragglerDetector(*LIMITS), 5, times)
    assert (found.rank, found.cause) == (1, "device") and 4.5 < found.ratio < 4.7


def test_all_ranks_of_a_slow_host_are_named() -> None:
    found = judge(StragglerDetector(*LIMITS), 5, synchronous([1.0] * 5 + [2.0] * 3))
    assert [finding.rank for finding in found] == [5, 6, 7]


def test_a_slow_link_is_named_among_three_ranks_and_more() -> None:
    times = synchronous([1.0] * 3, link=[0.002, 0.001, 0.021])
    detector = StragglerDetector(*LIMITS)
    (found,) = judge(detector, 5, times)
    assert (found.rank, found.cause) == (2, "link") and detector.slow_ranks == {2: "link"}
    assert judge(StragglerDetector(*LIMITS), 5, synchronous([1.0] * 3, link=[2e-5, 1e-5, 9e-4])) == []


def test_the_link_between_two_ranks_is_compared_with_its_own_past() -> None:
    detector = StragglerDetector(*LIMITS)
    assert judge(detector, 6, synchronous([1.0, 1.0], link=[0.001, 0.001])) == []
    assert judge(detector, 20, synchronous([1.0, 1.0])) == []  # rows without a probe decide nothing
    found = judge(detector, 3, synchronous([1.0, 1.0], link=[0.02, 0.02]))
    assert [(finding.rank, finding.cause) for finding in found] == [(0, "link"), (1, "link")]


@given(
    some.integers(3, 32).flatmap(lambda size: some.tuples(some.just(size), some.integers(0, size - 1))),
    some.integers(1, 20).flatmap(lambda size: some.tuples(some.just(size), some.integers(0, size - 1))),
)
def test_the_damaged_copy_and_its_tensor_are_named(ranks: tuple[int, int], tensors: tuple[int, int]) -> None:
    (size, bad), (number, at) = ranks, tensors
    sums = [list(range(number)) for _ in range(size)]
    assert compare_copies(sums, [list(range(size))]) is None
    sums[bad][at] = -1
    found = compare_copies(sums, [list(range(size))])
    assert found is not None and (found.ranks, found.tensor, found.has_majority) == ([bad], at, True)


def test_of_two_copies_none_has_the_majority() -> None:
    found = compare_copies([[1, 2, 3], [1, 2, 4]], [[0, 1]])
    assert found is not None and (found.ranks, found.tensor, found.has_majority) == ([0, 1], 2, False)


def test_parts_of_the_model_are_compared_each_by_itself() -> None:
    sums = [[1], [2], [1], [2], [1], [9]]
    assert compare_copies(sums[:4], [[0, 2], [1, 3]]) is None
    found = compare_copies(sums, [[0, 2, 4], [1, 3, 5]])
    assert found is not None and (found.ranks, found.has_majority) == ([5], True)
