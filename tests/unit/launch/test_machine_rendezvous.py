"""Machines meet over a real store: each a thread here, with connections of its own."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from anabatic.launch.machine_rendezvous import MachineRendezvous
from anabatic.launch.rendezvous import describe_store_error

FACTS = {"recipe": {"seed": 1}, "versions": {"torch": "2.13"}}


class Replaced(Exception):
    """Another process has the number."""


class Refused(Exception):
    """The machines run different jobs."""


def raise_replaced(address: str) -> NoReturn:
    raise Replaced(address)


def raise_refused(lines: list[str]) -> NoReturn:
    raise Refused(lines)


class Site:
    """A port on which machines meet."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.made: list[MachineRendezvous] = []

    def machine(
        self,
        number: int | None,
        nodes: tuple[int, int] = (2, 2),
        job: str = "job",
        seconds: float = 60.0,
        **more: object,
    ) -> MachineRendezvous:
        given: dict[str, object] = {"address": f"10.0.0.{number}", "facts": FACTS, "is_host": not self.made, **more}
        self.made.append(
            MachineRendezvous(
                host="127.0.0.1",
                port=self.port,
                job=job,
                nodes=nodes,
                node_rank=number,
                join_seconds=seconds,
                on_refused=raise_refused,
                on_replaced=raise_replaced,
                **given,  # type: ignore[arg-type]
            )
        )
        return self.made[-1]


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    for machine in reversed(made.made):  # machine 0 goes last
        machine.leave()


class Joining(threading.Thread):
    """A machine that waits for the others."""

    def __init__(self, machine: MachineRendezvous) -> None:
        super().__init__(daemon=True)
        self.machine = machine
        self.info: RendezvousInfo | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.info = self.machine.next_rendezvous()
        except Exception as error:
            self.error = error

    def place(self) -> tuple[int, int]:
        self.join(120)
        assert self.error is None and self.info is not None, self.error
        return self.info.rank, self.info.world_size

    def failure(self) -> Exception:
        self.join(120)
        assert self.error is not None
        return self.error


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_follow_the_numbers_and_all_know_where_rank_0_is(site: Site) -> None:
    machines = [site.machine(number, (3, 3)) for number in (1, 2, 0)]
    joining = [Joining(machine) for machine in machines]
    assert [one.place() for one in joining] == [(1, 3), (2, 3), (0, 3)]
    found = {(one.info.bootstrap_store_info.master_addr, one.info.bootstrap_store_info.master_port) for one in joining}
    assert len(found) == 1 and next(iter(found))[0] == "10.0.0.0"
    joining[0].info.store.set("x", "1")
    assert joining[2].info.store.get("x") == b"1"
    assert not any(machine.num_nodes_waiting() for machine in machines)


def test_a_failed_machine_ends_the_round_and_the_next_has_a_store_of_its_own(site: Site) -> None:
    zero, one = site.machine(0), site.machine(1)
    first = [Joining(machine) for machine in (zero, one)]
    assert [each.place() for each in first] == [(0, 2), (1, 2)]
    first[0].info.store.set("x", "of the first round")
    again = Joining(one)
    until(zero.num_nodes_waiting)
    second = [Joining(zero), again]
    assert [each.place() for each in second] == [(0, 2), (1, 2)]
    assert not second[0].info.store.check(["x"])
    assert not zero.num_nodes_waiting()


def test_one_that_comes_again_takes_the_place_that_was_its_own(site: Site) -> None:
    zero, one = site.machine(0), site.machine(1)
    joining = [Joining(zero), Joining(one)]
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]
    again = Joining(site.machine(1, address="10.0.0.9"))  # the first one was killed: it says no more
    until(zero.num_nodes_waiting)
    assert [Joining(zero).place(), again.place()] == [(0, 2), (1, 2)]
    cut_off = Joining(one).failure()
    assert isinstance(cut_off, Replaced) and str(cut_off) == "10.0.0.9"


def test_one_that_waits_is_told_that_it_was_replaced(site: Site) -> None:
    waiting = Joining(site.machine(1))
    until(lambda: site.made[0]._service and site.made[0]._service._coordinator.waiting)
    again = Joining(site.machine(1, address="10.0.0.9"))
    assert isinstance(waiting.failure(), Replaced)
    assert [Joining(site.machine(0)).place(), again.place()] == [(0, 2), (1, 2)]


def test_different_jobs_are_refused_on_every_machine(site: Site) -> None:
    facts = {"recipe": {"seed": 2}, "versions": {"torch": "2.12"}}
    joining = [Joining(site.machine(0)), Joining(site.machine(1, facts=facts))]
    for each in joining:
        assert each.failure().args == (["seed is 1 on machine 0 and 2 on machine 1"],)


def test_other_versions_are_a_warning_of_machine_0(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    facts = {**FACTS, "versions": {"torch": "2.12"}}
    joining = [Joining(site.machine(0)), Joining(site.machine(1, facts=facts))]
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]
    assert capfd.readouterr().err == "warning: torch is 2.13 on machine 0 and 2.12 on machine 1\n"


def test_another_job_that_comes_later_is_refused_alone(site: Site) -> None:
    joining = [Joining(site.machine(number, (2, 3))) for number in (0, 1)]
    until(lambda: site.made[0]._service)
    site.made[0]._service._coordinator._first_call = 0.0
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]
    late = Joining(site.machine(2, (2, 3), facts={**FACTS, "recipe": {"seed": 3}}))
    assert isinstance(late.failure(), Refused)
    assert not any(machine.num_nodes_waiting() for machine in site.made[:2])


def test_machines_of_another_job_on_the_port_are_none_of_ours(site: Site) -> None:
    ours = Joining(site.machine(0, seconds=3.0))
    others = Joining(site.machine(1, job="others", seconds=1.0))
    assert str(others.failure()).startswith("waiting for the other machines at 127.0.0.1")
    assert isinstance(ours.failure(), RendezvousTimeoutError)
    assert str(ours.failure()) == f"waiting for machine 1 at 127.0.0.1:{site.port} (1 of 2 are here)"


def test_a_job_that_has_ended_takes_nobody_in(site: Site) -> None:
    zero = Joining(site.machine(0, (1, 2)))
    until(lambda: site.made[0]._service)
    site.made[0]._service._coordinator._first_call = 0.0
    assert zero.place() == (0, 1)
    site.made[0].set_closed()
    waiting = Joining(site.machine(1, (1, 2)))
    assert isinstance(waiting.failure(), RendezvousClosedError) and site.made[0].is_closed()


def test_a_lost_machine_0_is_an_error_of_the_others(site: Site) -> None:
    joining = [Joining(site.machine(number)) for number in (0, 1)]
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]
    zero = site.made[0]
    zero.leave()
    zero._store = zero._service = None
    joining[0].info = None
    gc.collect()
    with pytest.raises(RendezvousConnectionError):
        until(site.made[1].num_nodes_waiting)


def test_another_program_on_the_port_is_named(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            while True:
                try:
                    with server.accept()[0] as one:
                        one.recv(100)
                        one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except OSError:  # the test is over
                    return

        threading.Thread(target=talk, daemon=True).start()
        site.port = server.getsockname()[1]
        with pytest.raises(RendezvousConnectionError) as caught:
            site.machine(1, is_host=False, seconds=1.0).next_rendezvous()
        server.shutdown(socket.SHUT_RDWR)
    assert describe_store_error(caught.value.__cause__) == "what answers there is another program, no training"
    assert describe_store_error(ValueError("a\n b")) == "ValueError: a b"
