"""Machines meet over real connections: each is a thread here."""

from __future__ import annotations

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

from anabatic.launch import coordinator_client
from anabatic.launch.machine_rendezvous import MachineRendezvous

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
        given: dict[str, object] = {"address": f"10.0.0.{number}", "facts": FACTS, "is_host": not self.made, "nproc": 1}
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
                **{**given, **more},  # type: ignore[arg-type]
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
    machines = [site.machine(number, (3, 3), nproc=number + 1) for number in (1, 2, 0)]
    joining = [Joining(machine) for machine in machines]
    assert [one.place() for one in joining] == [(1, 3), (2, 3), (0, 3)]
    assert [(machine.first_rank, machine.world_size) for machine in machines] == [(1, 6), (3, 6), (0, 6)]
    found = {(one.info.bootstrap_store_info.master_addr, one.info.bootstrap_store_info.master_port) for one in joining}
    assert len(found) == 1 and next(iter(found))[0] == "10.0.0.0"
    assert not any(machine.num_nodes_waiting() for machine in machines)


def test_a_failed_machine_ends_the_round_and_all_wait_for_the_end(site: Site) -> None:
    zero, one = site.machine(0), site.machine(1)
    first = [Joining(machine) for machine in (zero, one)]
    assert [each.place() for each in first] == [(0, 2), (1, 2)]
    again = Joining(one)
    until(zero.num_nodes_waiting)
    second = [Joining(zero), again]
    assert [each.place() for each in second] == [(0, 2), (1, 2)]
    assert not zero.num_nodes_waiting()
    assert not one.wait_for_all(0.3)
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(zero.wait_for_all(60)), daemon=True)
    waiting.start()
    assert one.wait_for_all(60)
    waiting.join(60)
    assert ended == [True]


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
    until(lambda: site.made[0]._server and site.made[0]._server._coordinator.waiting)
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
    until(lambda: site.made[0]._server)
    site.made[0]._server._coordinator._first_call = 0.0
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]
    late = Joining(site.machine(2, (2, 3), facts={**FACTS, "recipe": {"seed": 3}}))
    assert isinstance(late.failure(), Refused)
    assert not any(machine.num_nodes_waiting() for machine in site.made[:2])


def test_machines_of_another_job_on_the_port_are_told(site: Site) -> None:
    ours = Joining(site.machine(0, seconds=3.0))
    others = Joining(site.machine(1, job="others"))
    assert others.failure().args == (["--job-id is job on machine 0 and others here"],)
    assert isinstance(ours.failure(), RendezvousTimeoutError)
    assert str(ours.failure()) == f"waiting for machine 1 at 127.0.0.1:{site.port} (1 of 2 are here)"


def test_machines_that_cannot_understand_each_other_are_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Joining(site.machine(0, seconds=3.0))
    until(lambda: site.made[0]._server and site.made[0]._server._coordinator.waiting)
    monkeypatch.setattr(coordinator_client, "PROTOCOL", 99)
    (line,) = Joining(site.machine(1)).failure().args[0]
    assert line.startswith("anabatic is ") and "on machine 0" in line
    assert isinstance(ours.failure(), RendezvousTimeoutError)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"[]\n",
        b'{"protocol": 1}\n',
        b"\xff" * 99 + b"\n",
        b"[" * 99999 + b"\n",
    ],
)
def test_what_a_stranger_sends_disturbs_nobody(site: Site, sent: bytes) -> None:
    zero = Joining(site.machine(0))
    until(lambda: site.made[0]._server)
    with socket.create_connection(("127.0.0.1", site.port)) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(60)
        assert stranger.recv(100) == b""
    one = Joining(site.machine(1))
    assert [zero.place(), one.place()] == [(0, 2), (1, 2)]


def test_a_job_that_has_ended_takes_nobody_in(site: Site) -> None:
    zero = Joining(site.machine(0, (1, 2)))
    until(lambda: site.made[0]._server)
    site.made[0]._server._coordinator._first_call = 0.0
    assert zero.place() == (0, 1)
    site.made[0].set_closed()
    waiting = Joining(site.machine(1, (1, 2)))
    assert isinstance(waiting.failure(), RendezvousClosedError)


def test_a_lost_machine_0_is_an_error_of_the_others(site: Site) -> None:
    joining = [Joining(site.machine(number)) for number in (0, 1)]
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]
    site.made[0].leave()
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
    assert str(caught.value) == "what answers there is another program, no training"


def test_a_killed_machine_is_found_by_its_connection(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    joining = [Joining(site.machine(number)) for number in (0, 1)]
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]
    site.made[1]._client._socket.shutdown(socket.SHUT_RDWR)
    until(site.made[0].num_nodes_waiting)
    assert "warning: machine 1 (10.0.0.1) is lost" in capfd.readouterr().err
