"""When each stage of a pipeline computes and sends: 1F1B (PipeDream-Flush, arXiv 2006.09503) and its interleaved form
(Megatron-LM, arXiv 2104.04473, section 2.2), where each stage has several chunks of layers.

Chunk c of stage r is number `c * stages + r` in the order in which a micro-batch passes through them. Every rank knows
the whole timetable, and makes its transfers in one order: that in which they are ready if a backward pass takes twice
as long as a forward pass. Two ranks then never wait for each other, on whatever network.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import NamedTuple

from anabatic.plan.pipeline_stages import count_passes_ahead, get_first_group

_FORWARD_TIME, _BACKWARD_TIME = 1, 2


class Action(NamedTuple):
    """A pass of a micro-batch through a chunk of this stage."""

    is_backward: bool
    chunk: int
    micro_batch: int


class Transfer(NamedTuple):
    """What an action hands on to another stage; they are made in their order."""

    time: int
    source: int
    target: int
    action: Action


class Step(NamedTuple):
    """An action of one stage.

    Attributes:
        transfers: sends and receives of this stage to start before it, in order.
        needs: the one among all that have been started whose tensors the action reads; None: it needs none.
    """

    transfers: tuple[Transfer, ...]
    action: Action
    needs: Transfer | None


class Timetable(NamedTuple):
    """The steps of one stage, and the transfers after the last one."""

    steps: tuple[Step, ...]
    transfers: tuple[Transfer, ...]


def list_actions(stages: int, chunks: int, count: int, rank: int) -> list[Action]:
    """Return the actions of a stage in order: forward passes ahead, then one forward and one backward pass in turn.

    Micro-batches pass in groups of `stages`, each group through all chunks, the last chunk first on the way back. The
    first group has what is left over as well, so that any number of micro-batches leaves the stages no gap.
    """
    left = get_first_group(stages, count) - stages
    groups = [max(0, (index - left) // stages) for index in range(count)]
    forward = sorted((groups[index], chunk, index) for index in range(count) for chunk in range(chunks))
    ahead = min(count_passes_ahead(stages, chunks, count, rank), len(forward))
    to = [Action(False, chunk, index) for _, chunk, index in forward]
    back = [Action(True, chunks - 1 - chunk, index) for _, chunk, index in forward]
    turns = [action for pair in zip(to[ahead:], back, strict=False) for action in pair]
    return [*to[:ahead], *turns, *back[len(to) - ahead :]]


@functools.lru_cache(maxsize=8)
def build_timetable(stages: int, chunks: int, count: int) -> tuple[Timetable, ...]:
    """Return the timetable of every stage.

    Args:
        chunks: of each stage; count: micro-batches of a step.
    """
    actions = [list_actions(stages, chunks, count, rank) for rank in range(stages)]
    ends: dict[tuple[int, Action], int] = {}
    free, waiting = [0] * stages, [deque(row) for row in actions]
    while any(waiting):
        before = len(ends)
        for rank, row in enumerate(waiting):
            while row:
                source = _find_source(stages, chunks, rank, row[0])
                if source is not None and source not in ends:
                    break
                action = row.popleft()
                start = max(free[rank], 0 if source is None else ends[source])
                duration = _BACKWARD_TIME if action.is_backward else _FORWARD_TIME
                free[rank] = ends[rank, action] = start + duration
        if len(ends) == before:
            raise AssertionError(f"{stages} stages, {chunks} chunks, {count} micro-batches wait for each other")
    transfers = {}
    for (rank, action), end in ends.items():
        target = _find_target(stages, chunks, rank, action)
        if target is not None:
            transfers[rank, action] = Transfer(end, rank, target, action)
    return tuple(_list_steps(stages, chunks, rank, row, ends, transfers) for rank, row in enumerate(actions))


def _list_steps(
    stages: int,
    chunks: int,
    rank: int,
    actions: list[Action],
    ends: dict[tuple[int, Action], int],
    sent: dict[tuple[int, Action], Transfer],
) -> Timetable:
    """Put the transfers of a stage between its actions: those that are ready before an action ends come before it."""
    left = deque(sorted(one for one in sent.values() if rank in (one.source, one.target)))
    steps = []
    for action in actions:
        end = ends[rank, action]
        own = sent.get((rank, action), Transfer(end, rank, rank, action))
        before = []
        while left and left[0] < own:
            before.append(left.popleft())
        source = _find_source(stages, chunks, rank, action)
        steps.append(Step(tuple(before), action, None if source is None else sent.get(source)))
    return Timetable(tuple(steps), tuple(left))


def _find_source(stages: int, chunks: int, rank: int, action: Action) -> tuple[int, Action] | None:
    """Return the stage and the action whose result an action reads; None: it reads the batch.

    The backward pass of the last chunk reads the forward pass of the same.
    """
    is_backward, chunk, micro_batch = action
    number = chunk * stages + rank
    if is_backward and number == stages * chunks - 1:
        return rank, Action(False, chunk, micro_batch)
    other = number + 1 if is_backward else number - 1
    return None if other < 0 else (other % stages, Action(is_backward, other // stages, micro_batch))


def _find_target(stages: int, chunks: int, rank: int, action: Action) -> int | None:
    """Return the other stage that reads the result of an action."""
    number = action.chunk * stages + rank
    other = number - 1 if action.is_backward else number + 1
    return other % stages if 0 <= other < stages * chunks and other % stages != rank else None
