"""Machines meet over real connections: each is a thread here."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NoReturn

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from anabatic.launch import coordinator_client, coordinator_server, job_secret
from anabatic.launch.machine_rendezvous import LocalRendezvous, MachineRendezvous

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


@pytest.mark.process
def test_machines_of_another_job_on_the_port_are_told(site: Site) -> None:
    ours = Joining(site.machine(0, seconds=3.0))
    others = Joining(site.machine(1, job="others"))
    assert others.failure().args == (["--job-id is job on machine 0 and others here"],)
    assert isinstance(ours.failure(), RendezvousTimeoutError)
    assert str(ours.failure()) == f"waiting for machine 1 at 127.0.0.1:{site.port} (1 of 2 are here)"


@pytest.mark.process
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


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 5},
        {"number": "1"},
        {"number": -1},
        {"number": True},
        {"number": 1.5},
        {"address": None},
        {"address": "x" * 9999},
        {"address": "a\n\x1b[31mb"},
        {"port": 0},
        {"port": 99999},
        {"nproc": 0},
        {"nproc": 10**30},
        {"nproc": [1]},
    ],
)
def test_a_machine_that_says_nonsense_disturbs_nobody(site: Site, change: dict[str, object]) -> None:
    zero = Joining(site.machine(0))
    until(lambda: site.made[0]._server)
    join = {"kind": "join", "number": 1, "address": "a", "port": 1, "nproc": 1, **change}
    with Stranger(site.port) as stranger:
        assert stranger.prove("") == {"kind": "welcome"}
        stranger.send(join)
        stranger.socket.shutdown(socket.SHUT_WR)
        assert stranger.answers.read() == b""
    one = Joining(site.machine(1))
    assert [zero.place(), one.place()] == [(0, 2), (1, 2)]


class Stranger:
    """Speaks the language of machines by hand."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.answers = self.socket.makefile("rb")

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.close()
        self.socket.close()

    def send(self, message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def prove(self, secret: str, facts: object = FACTS, key: str = "k", **changes: object) -> dict[str, object]:
        """Greet as a machine does, with changes of the proof; return what machine 0 says to it."""
        self.send({"protocol": coordinator_server.PROTOCOL, "version": "0", "key": key, "nonce": "n"})
        challenge = json.loads(self.answers.readline())
        assert challenge["kind"] == "challenge"
        proof = job_secret.compute_proof(secret, job_secret.MACHINE, key, ("n", challenge["nonce"]))
        self.send({"proof": proof, **changes})
        self.send({"job": "job", "facts": facts})
        return json.loads(self.answers.readline() or b"{}")


SECRET = "s" * 16


def test_machines_of_one_secret_meet(site: Site) -> None:
    joining = [Joining(site.machine(number, secret=SECRET)) for number in (0, 1)]
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("own", "other"), [(SECRET, ""), ("", SECRET), (SECRET, "t" * 16)])
def test_a_machine_without_the_secret_takes_no_place(site: Site, own: str, other: str) -> None:
    zero = Joining(site.machine(0, secret=own))
    until(lambda: site.made[0]._server)
    stranger = Joining(site.machine(1, secret=other))
    assert stranger.failure().args == (["ANABATIC_JOB_SECRET on machine 0 and here differ"],)
    one = Joining(site.machine(1, secret=own))
    assert [zero.place(), one.place()] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("proof", [None, "", 5, "\ud800", "x" * 64])
def test_who_proves_nothing_is_refused_and_named_once(
    site: Site, proof: object, capfd: pytest.CaptureFixture[str]
) -> None:
    zero = Joining(site.machine(0, secret=SECRET))
    until(lambda: site.made[0]._server)
    for _ in range(2):
        with Stranger(site.port) as stranger:
            assert stranger.prove(SECRET, proof=proof)["kind"] == "refused"
    one = Joining(site.machine(1, secret=SECRET))
    assert [zero.place(), one.place()] == [(0, 2), (1, 2)]
    assert capfd.readouterr().err.count("warning: 127.0.0.1 was refused at") == 1


def test_a_proof_cannot_be_sent_back(site: Site) -> None:
    """Machine 0's own proof, and one for another number or another process, are none of the stranger's."""
    joining = Joining(site.machine(0, secret=SECRET))
    until(lambda: site.made[0]._server)
    with Stranger(site.port) as stranger:
        stranger.send({"protocol": coordinator_server.PROTOCOL, "version": "0", "key": "k", "nonce": "n"})
        challenge = json.loads(stranger.answers.readline())
        stranger.send({"proof": challenge["proof"]})
        assert json.loads(stranger.answers.readline())["kind"] == "refused"
    nonces = ("n", challenge["nonce"])
    given = job_secret.compute_proof(SECRET, job_secret.MACHINE, "k", nonces)
    for changed in (("machine", "other", nonces), ("machine", "k", ("n", "m")), ("coordinator", "k", nonces)):
        assert job_secret.compute_proof(SECRET, *changed) != given
    one = Joining(site.machine(1, secret=SECRET))
    assert [joining.place(), one.place()] == [(0, 2), (1, 2)]


def test_a_false_machine_0_is_told_nothing(site: Site) -> None:
    """Who has taken its port gets neither a proof nor the facts."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        site.port = server.getsockname()[1]
        one = Joining(site.machine(1, is_host=False, secret=SECRET, seconds=1.0))
        with server.accept()[0] as connection, connection.makefile("rb") as lines:
            lines.readline()
            connection.sendall(b'{"kind": "challenge", "nonce": "\\ud800", "proof": "\\ud800"}\n')
            received.append(lines.read())
    assert one.failure().args == (["ANABATIC_JOB_SECRET on machine 0 and here differ"],)
    assert received == [b""]


def test_a_long_greeting_and_a_silent_crowd_cost_little(site: Site) -> None:
    zero = Joining(site.machine(0, secret=SECRET))
    until(lambda: site.made[0]._server)
    server = site.made[0]._server
    with Stranger(site.port) as stranger, pytest.raises(OSError):
        for _ in range(1000):  # its end is a line of 1 MB
            stranger.socket.sendall(b"x" * 1024)
            time.sleep(0.001)
    with ExitStack() as stack:
        for _ in range(server._max_unproved + 30):
            stack.enter_context(socket.create_connection(("127.0.0.1", site.port)))
        until(lambda: len(server._unproved) == server._max_unproved)
        one = Joining(site.machine(1, secret=SECRET))
        assert [zero.place(), one.place()] == [(0, 2), (1, 2)]
    until(lambda: not server._unproved)


def test_facts_of_machines_that_have_gone_are_forgotten(site: Site) -> None:
    zero = Joining(site.machine(0))
    until(lambda: site.made[0]._server)
    server = site.made[0]._server
    for number in range(5):
        with Stranger(site.port) as stranger:
            facts = {"recipe": {"text": f"{number}" * 500_000}, "versions": {}}
            assert stranger.prove("", facts, key=f"k{number}") == {"kind": "welcome"}
    until(lambda: len(server._facts) == 1)
    with Stranger(site.port) as stranger, pytest.raises(ConnectionError):
        stranger.prove("", {"recipe": {"text": "x" * 9_000_000}, "versions": {}})
    one = Joining(site.machine(1))
    assert [zero.place(), one.place()] == [(0, 2), (1, 2)]
    assert set(server._digests) == set(server._writers) and len(server._facts) == 1


def test_more_different_jobs_than_a_job_can_have_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_server, "_MAX_DISTINCT_FACTS", 3)
    zero = Joining(site.machine(0))
    until(lambda: site.made[0]._server and site.made[0]._server._facts)
    with ExitStack() as stack:
        kinds = []
        for number in range(4):
            stranger = stack.enter_context(Stranger(site.port))
            facts = {"recipe": {"number": number}, "versions": {}}
            kinds.append(stranger.prove("", facts, key=f"k{number}")["kind"])
    assert kinds == ["welcome", "welcome", "refused", "refused"]
    one = Joining(site.machine(1))
    assert [zero.place(), one.place()] == [(0, 2), (1, 2)]


def test_workers_of_one_machine_meet_where_no_other_reaches_them() -> None:
    rendezvous = LocalRendezvous("job", 2)
    info = rendezvous.next_rendezvous()
    assert (info.rank, info.world_size, rendezvous.first_rank, rendezvous.world_size) == (0, 1, 0, 2)
    where = info.bootstrap_store_info
    client = TCPStore(where.master_addr, where.master_port, world_size=2, is_master=False)
    client.set("key", "value")
    assert client.get("key") == b"value"
    listening = [one for one in psutil.Process().net_connections() if one.laddr.port == where.master_port]
    assert {one.laddr.ip for one in listening} == {"127.0.0.1"}
    again = rendezvous.next_rendezvous()
    other = TCPStore("127.0.0.1", again.bootstrap_store_info.master_port, world_size=2, is_master=False)
    assert not other.check(["key"]), "each start has a store of its own"
    assert rendezvous.wait_for_all(0.0) and rendezvous.shutdown()


@pytest.mark.parametrize("seed", range(200))
def test_a_mutated_line_is_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    join = {"kind": "join", "number": 1, "address": "10.0.0.1", "port": 29500, "nproc": 8, "facts": FACTS}
    line = bytearray(json.dumps(join).encode() + b"\n")
    for _ in range(rng.randint(1, 6)):
        where = rng.randrange(len(line))
        line[where : where + rng.randrange(3)] = rng.choice([b"", b'"', b"9", b"{", b"\xff", b"null", b"-", b"\n"])
    try:
        offer = coordinator_server.parse_offer(coordinator_server.parse_object(bytes(line)))
    except ValueError:
        return
    assert offer.number is None or offer.number >= 0
    assert 0 < offer.port < 65536 and offer.nproc >= 1 and offer.address.isprintable()


def test_a_spare_takes_the_place_of_a_lost_machine(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    first = [Joining(site.machine(number, (3, 3), nproc=number + 1)) for number in range(3)]
    assert [each.place() for each in first] == [(0, 3), (1, 3), (2, 3)]
    spare = Joining(site.machine(None, (3, 3), address="10.0.0.7", nproc=5, seconds=0.5))
    until(lambda: site.made[3]._client and site.made[3]._client._is_spare)
    line = "the machine at 10.0.0.7 (10.0.0.7) is a spare: it waits until a place is free\n"
    assert capfd.readouterr().err.startswith(line), "machine 0 says it"
    time.sleep(1.0)
    assert spare.is_alive(), "a spare waits as long as the job runs"
    site.made[1].leave()
    again = Joining(site.made[0]), Joining(site.made[2])
    assert [each.place() for each in (*again, spare)] == [(0, 3), (2, 3), (1, 3)], "the others keep their ranks"
    assert [(each.first_rank, each.world_size) for each in site.made[2:]] == [(6, 9), (1, 9)]


def test_a_spare_that_was_not_needed_is_let_go(site: Site) -> None:
    first = [Joining(site.machine(number)) for number in range(2)]
    assert [each.place() for each in first] == [(0, 2), (1, 2)]
    spare = Joining(site.machine(None))
    until(lambda: site.made[2]._client and site.made[2]._client._is_spare)
    site.made[0].shutdown()
    assert isinstance(spare.failure(), RendezvousClosedError) and site.made[2].is_unused_spare


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


@pytest.mark.process
def test_a_machine_0_that_is_busy_is_asked_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_client, "_ATTEMPT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        site.port = server.getsockname()[1]
        one = Joining(site.machine(1, is_host=False, seconds=60.0))
        with server.accept()[0], server.accept()[0]:
            monkeypatch.setattr(coordinator_client, "_ATTEMPT_SECONDS", 30.0)
            while one.is_alive():
                with server.accept()[0] as connection:
                    connection.sendall(b'{"kind": "refused", "lines": ["at last"]}\n')
                    one.join(1.0)
    assert one.failure().args == (["at last"],)


def test_one_that_never_answers_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_client, "_ATTEMPT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        site.port = server.getsockname()[1]
        failure = Joining(site.machine(1, is_host=False, seconds=0.5)).failure()
    assert str(failure) == "what listens there does not answer: another program, or too busy"


@pytest.mark.process
def test_a_killed_machine_is_found_by_its_connection(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    joining = [Joining(site.machine(number)) for number in (0, 1)]
    assert [each.place() for each in joining] == [(0, 2), (1, 2)]
    site.made[1]._client._socket.shutdown(socket.SHUT_RDWR)
    until(site.made[0].num_nodes_waiting)
    assert "warning: machine 1 (10.0.0.1) is lost" in capfd.readouterr().err
