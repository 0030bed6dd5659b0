"""Decides which machines take part in a job: the rules of the rendezvous, without a network.

One `Coordinator` runs on machine 0. Machines join, are heard of, leave; each `tick` returns what is to be told. All
work is linear in the number of machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

FIRST_CALL_SECONDS = 30.0
"""Seconds that a job with enough machines waits for more before its first round, counted from the last arrival (as
`last_call_timeout` of torch 2.13, elastic/rendezvous/dynamic_rendezvous.py)."""
LATER_CALL_SECONDS = 5.0
"""The same before later rounds: who was in the round before is waited for in any case."""
LOST_SECONDS = 15.0
"""Seconds without a sign of life after which a machine is lost (torch: three heartbeats of 5 s)."""
BROKEN_SECONDS = 3.0
"""The same after its connection broke."""
_MAX_NAMED = 20
"""Most ranges of machines in a message."""


@dataclass(frozen=True)
class Machine:
    """A process that wants to take part.

    Attributes:
        key: name of the process, which no other has.
        number: the machine's number; None, or one above the job's places: it takes a place that is free.
        address: where it is, for messages.
        digest: of the facts about it that are compared.
    """

    key: str
    number: int | None
    address: str
    digest: str = ""


@dataclass(frozen=True)
class Meeting:
    """A round of the job: who takes part, by rank."""

    round: int
    machines: tuple[Machine, ...]


@dataclass(frozen=True)
class Decisions:
    """What is to be told.

    Attributes:
        meeting: a round that begins.
        replaced: key of a process that waited -> address of the one that has taken its number.
        closed: keys of processes that wait for a round that will not come.
        is_over: the round that runs is to be left by all who are in it.
        lost: machines of the round that are held for lost from now on.
        spares: machines that wait from now on until a place is free.
    """

    meeting: Meeting | None = None
    replaced: Mapping[str, str] = field(default_factory=dict)
    closed: tuple[str, ...] = ()
    is_over: bool = False
    lost: tuple[Machine, ...] = ()
    spares: tuple[Machine, ...] = ()


class Coordinator:
    """The state of a rendezvous.

    A round begins when nobody is in an earlier one any more and `max_nodes` machines wait, or `min_nodes` and none has
    come for a while. It is over when one of its machines is lost or joins again, or when there is room for one that
    waits. Who waits while all places are taken is a spare.

    Args:
        clock: returns the time in seconds.

    Attributes:
        round: number of the last round, from 1; 0: none has begun.
        waiting: key -> who waits for a round, in the order of arrival.
        running: key -> who is in the round that runs, by rank.
    """

    def __init__(
        self, min_nodes: int, max_nodes: int, clock: Callable[[], float], first_call: float = FIRST_CALL_SECONDS
    ) -> None:
        self.min_nodes, self.max_nodes = min_nodes, max_nodes
        self.round = 0
        self.waiting: dict[str, Machine] = {}
        self.running: dict[str, Machine] = {}
        self._clock, self._first_call = clock, first_call
        self._heard: dict[str, float] = {}
        self._last_arrival = clock()
        self._places: dict[str, int] = {}
        """Key -> place in the last round; ranks follow the places."""
        self._spares: set[str] = set()
        self._keys: dict[int, str] = {}
        self._replaced: dict[str, str] = {}
        self._replaced_waiting: dict[str, str] = {}
        self._must_end = self._told_over = self._is_closed = False

    def join(self, machine: Machine) -> str:
        """Add a machine to the next round; it replaces an earlier one with the same number.

        Returns:
            The address of the process that has replaced this one, which then does not join; else an empty string.
        """
        if machine.key in self._replaced:
            return self._replaced[machine.key]
        self.hear(machine.key)
        if machine.number is not None:
            other = self._keys.get(machine.number, machine.key)
            if other != machine.key and other in self._heard:
                self._replace(other, machine.address)
            self._keys[machine.number] = machine.key
        if self.running.pop(machine.key, None) is not None:
            self._must_end = True
        self.waiting[machine.key] = machine
        self._last_arrival = self._clock()
        return ""

    def _replace(self, key: str, address: str) -> None:
        self._replaced[key] = address
        if key in self.waiting:
            self._replaced_waiting[key] = address
        self._must_end |= key in self.running
        self.leave(key)

    def leave(self, key: str) -> None:
        """Remove a machine; the others end the round themselves if they need it."""
        for group in (self.waiting, self.running, self._heard):
            group.pop(key, None)
        self._spares.discard(key)

    def miss(self, key: str) -> None:
        """Record a broken connection: the machine counts as lost soon, unless it reconnects."""
        if key in self._heard:
            self._heard[key] = min(self._heard[key], self._clock() - LOST_SECONDS + BROKEN_SECONDS)

    def close(self) -> None:
        """Start no further round: the job has ended on some machine."""
        self._is_closed = True

    def hear(self, key: str) -> None:
        """Record a sign of life of a machine."""
        self._heard[key] = self._clock()

    def list_known(self) -> list[str]:
        """Return the keys of all who wait or run."""
        return [*self.waiting, *self.running]

    def tick(self) -> Decisions:
        """Return what is to be told now, each thing once."""
        now = self._clock()
        late = {key for key in self.list_known() if now - self._heard[key] > LOST_SECONDS}
        lost = tuple(machine for key, machine in self.running.items() if key in late)
        for key in late:
            self.leave(key)
        self._must_end |= bool(lost) or self._has_room(now)
        replaced, self._replaced_waiting = self._replaced_waiting, {}
        closed = tuple(self.waiting) if self._is_closed else ()
        for key in closed:
            self.leave(key)
        is_over = self._must_end and bool(self.running) and not self._told_over
        self._told_over |= is_over
        meeting = self._begin_round(now)
        return Decisions(meeting, replaced, closed, is_over, lost, self._find_new_spares())

    def _find_new_spares(self) -> tuple[Machine, ...]:
        """Return who waits, while all places are taken, and has not been told."""
        is_full = len(self.running) >= self.max_nodes
        new = tuple(each for key, each in self.waiting.items() if is_full and key not in self._spares)
        self._spares.update(machine.key for machine in new)
        return new

    def _has_room(self, now: float) -> bool:
        """Return whether the round has room for a waiting machine; those that arrive together join together."""
        together = len(self.waiting) + len(self.running)
        is_settled = together >= self.max_nodes or now - self._last_arrival >= LATER_CALL_SECONDS
        return bool(self.running and self.waiting) and len(self.running) < self.max_nodes and is_settled

    def _begin_round(self, now: float) -> Meeting | None:
        if self.running or self._is_closed or len(self.waiting) < self.min_nodes:
            return None
        patience = LATER_CALL_SECONDS if self.round else self._first_call
        if len(self.waiting) < self.max_nodes and now - self._last_arrival < patience:
            return None
        # Who was in the round before comes first, so that a spare takes no place that was another's.
        by_right = sorted(self.waiting, key=lambda key: key not in self._places)
        chosen = [self.waiting.pop(key) for key in by_right[: self.max_nodes]]
        self._places = self._assign_places(chosen)
        chosen.sort(key=lambda machine: self._places[machine.key])
        self.round += 1
        self.running = {machine.key: machine for machine in chosen}
        self._spares -= self.running.keys()
        self._must_end = self._told_over = False
        return Meeting(self.round, tuple(chosen))

    def _assign_places(self, machines: Iterable[Machine]) -> dict[str, int]:
        """Give each machine the place it had, else that of its number, else the first free one."""
        places: dict[str, int] = {}
        free = dict.fromkeys(range(self.max_nodes))
        wishes = (self._find_former_place, self._find_numbered_place, lambda _: next(iter(free)))
        remaining = list(machines)
        for wish in wishes:
            unplaced = []
            for machine in remaining:
                place = wish(machine)
                if place in free:
                    del free[place]
                    places[machine.key] = place
                else:
                    unplaced.append(machine)
            remaining = unplaced
        return places

    def _find_former_place(self, machine: Machine) -> int:
        return self._places.get(machine.key, -1)

    def _find_numbered_place(self, machine: Machine) -> int:
        return -1 if machine.number is None else machine.number

    def describe_missing(self, place: str) -> str:
        """Return one line about who is missing before the next round at a place; empty: nobody."""
        here = len(self.waiting)
        if self.running or here >= self.max_nodes:
            return ""
        count = self.max_nodes - here
        numbers = {machine.number for machine in self.waiting.values()}
        absent = [number for number in range(self.max_nodes) if number not in numbers]
        are_numbered = None not in numbers and len(absent) == count
        plural = "s" if count > 1 else ""
        machines = f"machine{plural} {format_ranges(absent)}" if are_numbered else f"{count} more machine{plural}"
        return f"waiting for {machines} at {place} ({here} of {self.max_nodes} are here)"


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, the first of them: `3, 7-9`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    separators = {0: "", 1: ", "}
    shown = [
        f"{first}{separators.get(last - first, '-')}{last if last > first else ''}"
        for first, last in ranges[:_MAX_NAMED]
    ]
    return ", ".join(shown) + (", and more" if len(ranges) > _MAX_NAMED else "")
