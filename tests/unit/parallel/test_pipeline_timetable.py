"""Stages compute every pass once, in the shortest time, and never wait for each other."""

from __future__ import annotations

import itertools

import pytest

from anabatic.parallel.pipeline_timetable import Action, Timetable, Transfer, build_timetable
from anabatic.plan.pipeline_stages import count_passes_in_flight, estimate_bubble

FORWARD, BACKWARD = 1, 2
SIZES = list(itertools.product(range(1, 7), range(1, 5), range(1, 20)))


def list_events(timetable: Timetable) -> list[Transfer | Action]:
    """Return what a stage does, in order."""
    events: list[Transfer | Action] = []
    for step in timetable.steps:
        events += [*step.transfers, step.action]
    return [*events, *timetable.transfers]


def run(stages: int, chunks: int, count: int, is_blocking: bool) -> int:
    """Return the time that all stages need.

    Args:
        is_blocking: a stage does nothing else from the start of a transfer until the other one has started it as well;
            otherwise it waits only for what an action reads.
    """
    timetables = build_timetable(stages, chunks, count)
    events = [list_events(timetable) for timetable in timetables]
    needs = [{step.action: step.needs for step in timetable.steps} for timetable in timetables]
    at, time = [0] * stages, [0] * stages
    started: dict[Transfer, dict[int, int]] = {}
    ended: dict[tuple[int, Action], int] = {}

    def advance(rank: int) -> bool:
        event = events[rank][at[rank]]
        if isinstance(event, Transfer):
            started.setdefault(event, {}).setdefault(rank, time[rank])
            if is_blocking and len(started[event]) < 2:
                return False
            if is_blocking:
                time[rank] = max(time[rank], *started[event].values())
        else:
            need = needs[rank][event]
            if need is not None:
                if need.source not in started.get(need, {}):
                    return False
                time[rank] = max(time[rank], started[need][need.source])
            require_inputs(rank, event)
            time[rank] += BACKWARD if event.is_backward else FORWARD
            ended[rank, event] = time[rank]
        at[rank] += 1
        return True

    def require_inputs(rank: int, action: Action) -> None:
        number, (is_backward, chunk, index) = action.chunk * stages + rank, action
        if is_backward:
            assert (rank, Action(False, chunk, index)) in ended
        other = number + 1 if is_backward else number - 1
        if 0 <= other < stages * chunks:
            assert ended[other % stages, Action(is_backward, other // stages, index)] <= time[rank]

    while any(position < len(row) for position, row in zip(at, events, strict=True)):
        moved = [rank for rank in range(stages) if at[rank] < len(events[rank]) and advance(rank)]
        assert moved, f"{stages} stages, {chunks} chunks, {count} micro-batches wait for each other"
    assert len(ended) == 2 * stages * chunks * count
    return max(time)


@pytest.mark.process
@pytest.mark.parametrize("is_blocking", [False, True])
def test_no_stage_waits_for_another_that_waits_for_it(is_blocking: bool) -> None:
    """`run` fails where stages wait for each other; all work of the busiest stage is done at its end."""
    for stages, chunks, count in SIZES:
        assert run(stages, chunks, count, is_blocking) >= (FORWARD + BACKWARD) * chunks * count


def test_stages_wait_no_longer_than_the_schedule_says() -> None:
    for stages, chunks, count in SIZES:
        took, worked = run(stages, chunks, count, False), (FORWARD + BACKWARD) * chunks * count
        if count >= stages or chunks == 1:
            assert 1 - worked / took == pytest.approx(estimate_bubble(stages, chunks, count))
        else:
            assert 1 - worked / took > estimate_bubble(stages, chunks, count)


def test_as_many_passes_are_in_flight_as_are_counted() -> None:
    for stages, chunks, count in SIZES:
        for rank, timetable in enumerate(build_timetable(stages, chunks, count)):
            changes = [-1 if step.action.is_backward else 1 for step in timetable.steps]
            assert max(itertools.accumulate(changes)) == count_passes_in_flight(stages, chunks, count, rank)


def test_both_ends_make_their_transfers_in_one_order() -> None:
    for sizes in SIZES:
        timetables = build_timetable(*sizes)
        for timetable in timetables:
            transfers = [event for event in list_events(timetable) if isinstance(event, Transfer)]
            assert transfers == sorted(transfers)
        for one, two in itertools.combinations(timetables, 2):
            both = {event for event in list_events(one)} & {event for event in list_events(two)}
            orders = [
                [event for event in list_events(end) if event in both and isinstance(event, Transfer)]
                for end in (one, two)
            ]
            assert orders[0] == orders[1]
