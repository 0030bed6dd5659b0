"""Who takes part in a job on several machines: the rules, without a network and with a clock of the tests."""

from __future__ import annotations

import random

import pytest

from anabatic.launch.coordinator import (
    FIRST_CALL_SECONDS,
    LATER_CALL_SECONDS,
    LOST_SECONDS,
    Coordinator,
    Decisions,
    Machine,
    format_ranges,
)


class Job:
    """A coordinator with a clock that the test moves, and machines that are heard of unless they are silent."""

    def __init__(self, min_nodes: int, max_nodes: int) -> None:
        self.now = 0.0
        self.coordinator = Coordinator(min_nodes, max_nodes, lambda: self.now)
        self.silent: set[str] = set()

    def join(self, key: str, number: int | None = None) -> str:
        return self.coordinator.join(Machine(key, number, f"address of {key}"))

    def wait(self, seconds: float = 0.0) -> Decisions:
        """Let time pass in steps of a second; return the first decisions that say anything, else the last."""
        while True:
            for key in self.coordinator.list_known():
                if key not in self.silent:
                    self.coordinator.hear(key)
            told = self.coordinator.tick()
            if seconds <= 0 or told.meeting or told.replaced or told.closed or told.is_over or told.lost:
                return told
            step = min(1.0, seconds)
            self.now += step
            seconds -= step

    def meet(self, seconds: float = 0.0) -> list[str]:
        """Return who meets, by rank."""
        meeting = self.wait(seconds).meeting
        return [machine.key for machine in meeting.machines] if meeting else []


def test_all_meet_by_number_when_the_last_has_come() -> None:
    job = Job(3, 3)
    job.join("c", 2)
    job.join("a", 0)
    assert job.meet(1000) == []
    job.join("b", 1)
    assert job.meet() == ["a", "b", "c"] and job.coordinator.round == 1
    assert job.meet(1000) == []


def test_without_numbers_the_order_of_arrival_decides_and_stays() -> None:
    job = Job(2, 3)
    for key in "xyz":
        job.join(key)
    assert job.meet() == ["x", "y", "z"]
    for key in "zyx":
        job.join(key)
    assert job.meet() == ["x", "y", "z"]


def test_enough_machines_wait_for_more_then_begin() -> None:
    job = Job(2, 4)
    job.join("a", 0)
    assert job.meet(1000) == []
    job.join("b", 1)
    assert job.meet(FIRST_CALL_SECONDS - 2) == []
    job.join("c", 3)
    assert job.meet(FIRST_CALL_SECONDS - 2) == []
    assert job.meet(3) == ["a", "b", "c"]


def test_a_machine_that_fails_ends_the_round_for_all() -> None:
    job = Job(2, 2)
    job.join("a", 0)
    job.join("b", 1)
    assert job.meet()
    job.join("b", 1)
    assert job.wait().is_over
    assert not job.wait(100).is_over, "told once"
    job.join("a", 0)
    assert job.meet() == ["a", "b"] and job.coordinator.round == 2


def test_a_lost_machine_ends_the_round_and_the_others_go_on_where_they_may() -> None:
    job = Job(2, 3)
    for number, key in enumerate("abc"):
        job.join(key, number)
    assert job.meet()
    job.silent.add("b")
    told = job.wait(LOST_SECONDS + 2)
    assert [machine.key for machine in told.lost] == ["b"] and told.is_over
    job.join("a", 0)
    assert job.meet() == []
    job.join("c", 2)
    assert job.meet(LATER_CALL_SECONDS + 1) == ["a", "c"]


def test_a_new_machine_is_taken_in_and_several_at_once() -> None:
    job = Job(2, 5)
    for number, key in enumerate("ab"):
        job.join(key, number)
    assert job.meet(FIRST_CALL_SECONDS + 1)
    job.join("c", 2)
    assert not job.wait(LATER_CALL_SECONDS - 2).is_over
    job.join("d", 3)
    assert job.wait(LATER_CALL_SECONDS + 1).is_over
    for number, key in enumerate("ab"):
        job.join(key, number)
    assert job.meet(LATER_CALL_SECONDS + 1) == ["a", "b", "c", "d"]


def test_a_spare_waits_until_a_place_is_free() -> None:
    job = Job(2, 2)
    job.join("a", 0)
    job.join("b", 1)
    assert job.meet()
    job.join("spare", 2)
    assert [machine.key for machine in job.wait().spares] == ["spare"]
    told = job.wait(1000)
    assert not told.is_over and not told.meeting and not told.spares, "it is told once"
    for key, number in (("b", 1), ("a", 0)):  # a failure of the workers: the spare takes nobody's place
        job.join(key, number)
    assert job.meet() == ["a", "b"]
    job.silent.add("a")
    assert job.wait(LOST_SECONDS + 2).is_over
    job.join("b", 1)
    assert job.meet() == ["spare", "b"], "b keeps its rank"


def test_a_machine_that_comes_again_replaces_itself() -> None:
    job = Job(2, 2)
    job.join("old", 1)
    assert job.join("new", 1) == ""
    assert dict(job.wait().replaced) == {"old": "address of new"}
    assert job.join("old", 1) == "address of new", "it does not push back"
    job.join("zero", 0)
    assert job.meet() == ["zero", "new"]
    job.join("newer", 1)
    told = job.wait()
    assert told.is_over and not told.replaced, "who runs is told when it joins again"
    job.join("zero", 0)
    assert job.meet() == ["zero", "newer"]
    assert job.join("new", 1) == "address of newer"


def test_who_waits_is_told_that_the_job_has_ended() -> None:
    job = Job(2, 3)
    job.join("a", 0)
    job.coordinator.close()
    assert job.wait().closed == ("a",)
    job.join("b", 1)
    assert job.wait().closed == ("b",) and job.meet(1000) == []


def test_who_leaves_is_not_waited_for() -> None:
    job = Job(1, 2)
    job.join("a", 0)
    job.join("b", 1)
    assert job.meet()
    job.coordinator.leave("b")
    assert not job.wait(1000).is_over, "the others miss it themselves"
    job.join("a", 0)
    assert job.meet(LATER_CALL_SECONDS + 1) == ["a"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 2], "1, 2"),
        ([9, 7, 8, 3], "3, 7-9"),
        (range(0, 100, 2), ", ".join(map(str, range(0, 40, 2))) + ", and more"),
    ],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text


def test_the_missing_are_named() -> None:
    job = Job(16, 16)
    for number in (0, 1, 5):
        job.join(str(number), number)
    assert job.coordinator.describe_missing("h:1") == "waiting for machines 2-4, 6-15 at h:1 (3 of 16 are here)"
    job.join("without")
    assert job.coordinator.describe_missing("h:1") == "waiting for 12 more machines at h:1 (4 of 16 are here)"


class Chaos:
    """Random arrivals, failures, losses and replacements, and what must hold after each."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.max_nodes = self.rng.randint(1, 6)
        self.job = Job(self.rng.randint(1, self.max_nodes), self.max_nodes)
        self.coordinator = self.job.coordinator
        self.numbered = self.rng.random() < 0.7
        self.alive: dict[str, int | None] = {}
        self.must_rejoin: set[str] = set()
        self.former: list[str] = []

    def join(self, key: str) -> None:
        self.must_rejoin.discard(key)
        if self.job.join(key, self.alive[key]):
            self.alive.pop(key)

    def arrive(self, step: int) -> None:
        key = f"m{step}"
        self.alive[key] = self.rng.randrange(self.max_nodes + 2) if self.numbered else None
        self.join(key)

    def fail(self, _: int) -> None:
        key = self.rng.choice([*self.coordinator.running, ""])
        if key in self.alive and key not in self.job.silent:
            self.join(key)

    def lose(self, _: int) -> None:
        if self.alive:
            key = self.rng.choice(list(self.alive))
            self.job.silent.add(key)
            self.alive.pop(key)
            self.must_rejoin.discard(key)

    def rejoin(self, _: int) -> None:
        if self.must_rejoin:
            self.join(self.rng.choice(sorted(self.must_rejoin)))

    def wait(self, seconds: float) -> None:
        told = self.job.wait(seconds)
        if told.is_over:
            running = self.coordinator.running
            self.must_rejoin.update(key for key in running if key in self.alive and key not in self.job.silent)
        if told.meeting:
            self.check_round([machine.key for machine in told.meeting.machines])
        for key in told.replaced:
            self.alive.pop(key, None)
        assert set(self.coordinator.waiting).isdisjoint(self.coordinator.running)

    def check_round(self, keys: list[str]) -> None:
        assert self.coordinator.min_nodes <= len(keys) <= self.max_nodes and len(set(keys)) == len(keys)
        assert set(keys).isdisjoint(self.coordinator.waiting)
        before = [key for key in self.former if key in keys]
        assert before == [key for key in keys if key in self.former], "who stays keeps its order"
        if len(keys) == len(self.former) == self.max_nodes:
            assert all(keys[self.former.index(key)] == key for key in before), "and, in a full job, its rank"
        self.former = keys
        self.must_rejoin.difference_update(keys)


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_the_job_goes_on(seed: int) -> None:
    chaos = Chaos(seed)
    actions = [chaos.arrive] * 3 + [chaos.fail] * 2 + [chaos.lose] + [chaos.rejoin] * 4
    for step in range(60):
        chaos.rng.choice(actions)(step)
        chaos.wait(chaos.rng.choice([0, 0, 1, 8, 40]))
    for _ in range(200):
        for key in sorted(chaos.must_rejoin & set(chaos.alive)):
            chaos.join(key)
        chaos.wait(5)
    coordinator = chaos.coordinator
    here = [key for key in coordinator.list_known() if key in chaos.alive]
    if len(here) >= coordinator.min_nodes:
        assert coordinator.running and set(coordinator.running) <= set(chaos.alive), "those who are left have met"
        assert len(coordinator.running) == min(len(here), chaos.max_nodes), "and nobody waits while there is room"
