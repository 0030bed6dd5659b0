"""The rendezvous of a job on several machines, for torch's agent.

Machine 0 hosts a store (torch's TCPStore) and decides, by the rules of `coordinator.py`, who takes part. Machines append
messages to a queue in the store and read an answer of their own: work and traffic are linear in the number of machines,
where torch's own rendezvous lets every machine rewrite one state that names all of them. Imported by the agent and the
preflight alone, after torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import DistError, DistNetworkError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from anabatic.launch.coordinator import LOST_SECONDS, Coordinator, Decisions, Machine, Meeting
from anabatic.launch.rendezvous import describe_differences
from anabatic.launch.rendezvous_endpoint import REMINDER_SECONDS

BACKEND = "anabatic"
"""Name of this rendezvous among those of torch (`--rdzv-backend`)."""
_CONNECT_SECONDS = 30.0
"""Timeout of one connection, and of one request."""
_RETRY_SECONDS = 0.5
_BEAT_SECONDS = LOST_SECONDS / 3
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.05, 1.0
"""Between two looks for an answer: it grows while a machine waits."""
_MACHINES_PER_POLL = 256
"""Looks for the end of a round, of all machines together, in a second."""
_SERVICE_SECONDS = 0.05
_MESSAGE_SECONDS = 5.0
"""What a message may take that was announced: its sender may have been killed in between."""
_GOODBYE_SECONDS = 2.0
"""Seconds for the last answers to be read before the store goes with machine 0."""
_MAX_REFUSALS = 20
"""Most differences that are told."""


class MachineRendezvous(RendezvousHandler):
    """This machine's part in the rendezvous.

    Args:
        host, port: where machine 0 hosts the store.
        job: job id; machines of another job on the same port are ignored.
        nodes: fewest and most machines that take part.
        node_rank: this machine's number; None: the order of arrival decides.
        address: of this machine.
        facts: about this machine, compared with those of the others; parts `recipe` and `versions`.
        join_seconds: timeout for the others to come.
        is_host: this machine hosts the store.
        on_refused: called with the differences when recipes differ; it must raise.
        on_replaced: called with the address of a later process with the same number; it must raise.
    """

    def __init__(
        self,
        host: str,
        port: int,
        job: str,
        nodes: tuple[int, int],
        node_rank: int | None,
        address: str,
        facts: Mapping[str, Any],
        join_seconds: float,
        is_host: bool,
        on_refused: Callable[[list[str]], NoReturn],
        on_replaced: Callable[[str], NoReturn],
    ) -> None:
        self.host, self.port, self.job, self.nodes, self.address = host, port, job, nodes, address
        self.join_seconds = join_seconds
        self._node_rank, self._facts = node_rank, json.dumps(facts, sort_keys=True)
        self._on_refused, self._on_replaced = on_refused, on_replaced
        self._is_host = is_host
        self._key = uuid.uuid4().hex[:12]
        self._joins = self._round = self._size = 0
        self._next_look = 0.0
        self._store: Any = None
        self._service: _CoordinatorService | None = None
        self._heart: _Heart | None = None

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the job id."""
        return self.job

    @property
    def use_agent_store(self) -> bool:
        """False: the workers of each round meet at a store of their own, without keys of the round before."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round and return this machine's place in it.

        Raises:
            RendezvousTimeoutError: too few machines came; RendezvousClosedError: the job has ended;
            RendezvousConnectionError: machine 0 is lost, or another program answers there.
        """
        deadline = time.monotonic() + self.join_seconds
        try:
            self._open(deadline)
            answer = self._join(deadline)
            if "closed" in answer:
                raise RendezvousClosedError(f"the job {self.job} has ended")
            if "replaced" in answer:
                self._on_replaced(answer["replaced"])
            if "refused" in answer:
                self._on_refused(answer["refused"])
            self._round, self._size = answer["round"], answer["size"]
            # Of its own connection: the agent waits in this store, which would keep the sign of life from being sent.
            store = PrefixStore(f"{self._prefix}/round/{self._round}", self._connect(deadline))
            info = RendezvousStoreInfo.build(answer["rank"], store, local_addr=self.address)
        except DistError as error:
            raise RendezvousConnectionError(str(error)) from error
        return RendezvousInfo(store, answer["rank"], self._size, info)

    def num_nodes_waiting(self) -> int:
        """Return 1 when the round is over, so that the agent joins the next one; the agent asks ten times a second.

        Raises:
            RendezvousConnectionError: machine 0 is lost.
        """
        if time.monotonic() < self._next_look:
            return 0
        self._next_look = time.monotonic() + max(0.25, self._size / _MACHINES_PER_POLL)
        try:
            return int(self._store.check([f"{self._prefix}/over/{self._round}"]))
        except DistError as error:
            raise RendezvousConnectionError(str(error)) from error

    def is_closed(self) -> bool:
        """Return whether the job has ended somewhere."""
        return bool(self._store.check([f"{self._prefix}/closed"]))

    def set_closed(self) -> None:
        """Say that the job has ended: no further round begins."""
        self._post({"kind": "close"})

    def leave(self) -> None:
        """Say that this machine goes, and stop: Python aborts at exit while a thread is in the store (torch 2.13)."""
        if self._heart is not None:
            self._heart.stop()
            self._heart = None
            with suppress(DistError):
                self._post({"kind": "leave", "key": self._key})
        if self._service is not None:
            self._service.stop()
            self._service = None

    def shutdown(self) -> bool:
        """Close the rendezvous and leave it."""
        try:
            self.set_closed()
        except DistError:  # machine 0 has gone before
            return False
        finally:
            self.leave()
        return True

    @property
    def _prefix(self) -> str:
        return f"anabatic/{self.job}"

    def _open(self, deadline: float) -> None:
        if self._store is not None:
            return
        if self._is_host:
            server = TCPStore(self.host, self.port, is_master=True, wait_for_workers=False)
            coordinator = Coordinator(*self.nodes, time.monotonic)
            self._service = _CoordinatorService(server, self._prefix, coordinator, f"{self.host}:{self.port}")
            self._service.start()
        self._store = self._connect(deadline)
        digest = hashlib.sha256(self._facts.encode()).hexdigest()[:32]
        self._digest = digest
        if not self._store.check([f"{self._prefix}/facts/{digest}"]):
            self._store.set(f"{self._prefix}/facts/{digest}", self._facts)
        self._heart = _Heart(self._connect(deadline), f"{self._prefix}/beat/{self._key}")
        self._heart.start()

    def _join(self, deadline: float) -> dict[str, Any]:
        self._joins += 1
        own = {"key": self._key, "number": self._node_rank, "address": self.address, "digest": self._digest}
        self._post({"kind": "join", "join": self._joins, **own})
        entry, pause = f"{self._prefix}/answer/{self._key}/{self._joins}", _MIN_POLL_SECONDS
        while not self._store.check([entry]):
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(self._read_missing())
            time.sleep(pause)
            pause = min(1.5 * pause, _MAX_POLL_SECONDS)
        answer: dict[str, Any] = json.loads(self._store.get(entry))
        return answer

    def _read_missing(self) -> str:
        entry = f"{self._prefix}/missing"
        missing = self._store.get(entry).decode() if self._store.check([entry]) else "the other machines"
        return f"waiting for {missing} at {self.host}:{self.port}"

    def _post(self, message: Mapping[str, Any]) -> None:
        place = self._store.add(f"{self._prefix}/queue", 1)
        self._store.set(f"{self._prefix}/queue/{place}", json.dumps(message))

    def _connect(self, deadline: float) -> Any:
        while True:
            timeout = min(_CONNECT_SECONDS, max(1.0, deadline - time.monotonic()))
            try:
                store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout))
            except DistNetworkError:  # machine 0 has not opened it yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
                continue
            store.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
            return store


class _Heart(threading.Thread):
    """Counts up this machine's entry in the store, on a connection of its own."""

    def __init__(self, store: Any, entry: str) -> None:
        super().__init__(daemon=True, name="rendezvous-heart")
        self._store, self._entry = store, entry
        self._stop_event = threading.Event()
        store.add(entry, 1)

    def run(self) -> None:
        """Beat until `stop`, or until the store is lost, which the agent finds itself."""
        with suppress(DistError):
            while not self._stop_event.wait(_BEAT_SECONDS):
                self._store.add(self._entry, 1)

    def stop(self) -> None:
        """End the thread."""
        self._stop_event.set()
        if self.is_alive():
            self.join(_CONNECT_SECONDS)


class _CoordinatorService(threading.Thread):
    """Reads the machines' messages from the store and writes the coordinator's answers there."""

    def __init__(self, store: Any, prefix: str, coordinator: Coordinator, endpoint: str) -> None:
        super().__init__(daemon=True, name="rendezvous-coordinator")
        self._store, self._prefix, self._coordinator, self._endpoint = store, prefix, coordinator, endpoint
        self._stop_event = threading.Event()
        self._num_read = 0
        self._announced_at = 0.0
        self._joins: dict[str, int] = {}
        self._beats: dict[str, bytes] = {}
        self._next_beats = self._reminded_at = time.monotonic()
        self._reference = ""
        """Digest of the facts of the first round's first machine."""

    def run(self) -> None:
        """Serve until `stop`."""
        with suppress(DistError):  # the store is closed when the agent ends
            while not self._stop_event.wait(_SERVICE_SECONDS):
                self.serve_once()

    def stop(self) -> None:
        """Let the last answers be read, then end."""
        if self.is_alive():
            self._stop_event.wait(_GOODBYE_SECONDS if self._coordinator.waiting or self._coordinator.running else 0)
            self._stop_event.set()
            self.join(_CONNECT_SECONDS)

    def serve_once(self) -> None:
        """Read what has come, and tell what follows from it."""
        num_messages = self._store.add(f"{self._prefix}/queue", 0)
        while self._num_read < num_messages:
            entry = f"{self._prefix}/queue/{self._num_read + 1}"
            if not self._store.check([entry]):
                self._announced_at = self._announced_at or time.monotonic()
                if time.monotonic() - self._announced_at < _MESSAGE_SECONDS:
                    break
            else:
                self._handle_message(json.loads(self._store.get(entry)))
                self._store.delete_key(entry)
            self._num_read += 1
            self._announced_at = 0.0
        if time.monotonic() >= self._next_beats:
            self._next_beats = time.monotonic() + _BEAT_SECONDS / 2
            self._read_beats()
        self._tell(self._coordinator.tick())
        if time.monotonic() - self._reminded_at > REMINDER_SECONDS:
            self._remind()

    def _handle_message(self, message: dict[str, Any]) -> None:
        if message["kind"] == "close":
            self._coordinator.close()
            self._store.set(f"{self._prefix}/closed", "")
        elif message["kind"] == "leave":
            self._coordinator.leave(message["key"])
        else:
            self._handle_join(Machine(*(message[name] for name in ("key", "number", "address", "digest"))), message)

    def _handle_join(self, machine: Machine, message: dict[str, Any]) -> None:
        self._joins[machine.key] = message["join"]
        if self._reference and (differences := self._find_differences([machine], "recipe")):
            self._answer(machine.key, {"refused": differences})
        elif address := self._coordinator.join(machine):
            self._answer(machine.key, {"replaced": address})

    def _read_beats(self) -> None:
        keys = self._coordinator.list_known()
        if not keys:
            return
        beats = self._store.multi_get([f"{self._prefix}/beat/{key}" for key in keys])
        for key, beat in zip(keys, beats, strict=True):
            if self._beats.get(key) != beat:
                self._beats[key] = beat
                self._coordinator.hear(key)

    def _tell(self, decisions: Decisions) -> None:
        for machine in decisions.lost:
            sys.stderr.write(
                f"warning: {_name(machine)} has given no sign of life for {LOST_SECONDS:g} s: it is lost\n"
            )
        for key, address in decisions.replaced.items():
            self._answer(key, {"replaced": address})
        for key in decisions.closed:
            self._answer(key, {"closed": True})
        if decisions.is_over:
            self._store.set(f"{self._prefix}/over/{self._coordinator.round}", "")
        if decisions.meeting is not None:
            self._begin(decisions.meeting)

    def _begin(self, meeting: Meeting) -> None:
        if not self._reference:
            self._reference = meeting.machines[0].digest
        differences = self._find_differences(meeting.machines, "recipe")
        for line in [] if differences else self._find_differences(meeting.machines, "versions"):
            sys.stderr.write(f"warning: {line}\n")
        size = len(meeting.machines)
        answers = [
            {"refused": differences} if differences else {"round": meeting.round, "rank": rank, "size": size}
            for rank in range(size)
        ]
        self._store.multi_set(
            [self._answer_entry(machine.key) for machine in meeting.machines], [json.dumps(one) for one in answers]
        )

    def _find_differences(self, machines: Any, part: str) -> list[str]:
        """Return what differs from the first round's first machine, of machines whose digest does."""
        others = {_name(machine): machine for machine in machines if machine.digest != self._reference}
        if not others:
            return []
        facts = {name: self._read_facts(machine.digest) for name, machine in others.items()}
        return describe_differences(self._read_facts(self._reference), facts, part)[:_MAX_REFUSALS]

    def _read_facts(self, digest: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._store.get(f"{self._prefix}/facts/{digest}"))
        return facts

    def _remind(self) -> None:
        self._reminded_at = time.monotonic()
        if missing := self._coordinator.describe_missing():
            self._store.set(f"{self._prefix}/missing", missing)
            sys.stderr.write(
                f"waiting for {missing[: missing.index(' (')]} at {self._endpoint}{missing[missing.index(' (') :]}\n"
            )

    def _answer(self, key: str, answer: dict[str, Any]) -> None:
        self._store.set(self._answer_entry(key), json.dumps(answer))

    def _answer_entry(self, key: str) -> str:
        return f"{self._prefix}/answer/{key}/{self._joins[key]}"


def _name(machine: Machine) -> str:
    return f"machine {machine.number}" if machine.number is not None else f"the machine at {machine.address}"
