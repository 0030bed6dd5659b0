"""Where machines meet: a server on machine 0 that follows the rules of `coordinator.py`.

Every machine keeps one connection open (`coordinator_client.py`) and sends lines of JSON; what concerns it is sent back
as it happens. Nobody polls, and work and traffic are linear in the number of machines. A machine proves first that it
has the secret of the job (`job_secret.py`); until then it costs little, and learns the version alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from anabatic.core.process_info import allow_open_files
from anabatic.launch import job_secret
from anabatic.launch.coordinator import LOST_SECONDS, Coordinator, Decisions, Machine, Meeting
from anabatic.launch.rendezvous import describe_differences
from anabatic.launch.rendezvous_endpoint import REMINDER_SECONDS

PROTOCOL = 2
"""Of the lines; a machine that speaks another one gets an error."""
MAX_FACTS_BYTES = 1 << 20
"""Most bytes of the line with the facts about a machine, which hold its recipe."""
MAX_LINE_BYTES = 32 << 10
"""Most bytes of any other line."""
MAX_MACHINES = 1 << 20
_MAX_TEXT_CHARS = 1024
_SPARE_FILES = 256
"""Files that this process opens besides the connections."""
_SPARE_CONNECTIONS = 256
"""Connections beyond the machines of the job that may be open before they have proved who they are."""
_MAX_DISTINCT_FACTS = 64
"""Most different facts that are kept; those of a job's machines are equal, or a few are wrong."""
_BLOCK_BYTES = 16 << 10
_MAX_WARNED = 20
"""Most addresses without the secret that are named."""
_TICK_SECONDS = 0.1
_GREETING_SECONDS = 30.0
_STOP_SECONDS = 5.0
_MAX_REFUSALS = 20
"""Most differences that are reported."""
_BACKLOG = 4096
"""Connections that wait to be accepted; the system may allow fewer (net.core.somaxconn)."""


@dataclass(frozen=True)
class Offer:
    """What a machine brings to a round.

    Attributes:
        number: of the machine; None: it has none.
        address, port: where workers could meet if this machine is the first.
        nproc: workers there.
    """

    number: int | None
    address: str
    port: int
    nproc: int


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: it is none, or torn.
    """
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("brackets in brackets") from error
    if not line.endswith(b"\n") or not isinstance(message, dict):
        raise ValueError("no JSON object and line end")
    return message


def parse_offer(message: Mapping[str, Any]) -> Offer:
    """Return what a message of the kind `join` says.

    Raises:
        ValueError: a part is missing, of another type or out of its range.
    """
    number = None if message.get("number") is None else _read_number(message, "number", 0, MAX_MACHINES - 1)
    address = _read_text(message, "address")
    return Offer(number, address, _read_number(message, "port", 1, 65535), _read_number(message, "nproc", 1, 4096))


def parse_facts(greeting: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the facts of a greeting.

    Raises:
        ValueError: they have not the two parts that are compared.
    """
    facts = greeting.get("facts")
    if not isinstance(facts, dict) or not all(isinstance(facts.get(part), dict) for part in ("recipe", "versions")):
        raise ValueError("facts without recipe and versions")
    return facts


def _read_number(message: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(name)
    return value


def _read_text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT_CHARS or not value.isprintable():
        raise ValueError(name)
    return value


class CoordinatorServer:
    """Runs a coordinator in a thread, for the connections to a port.

    Args:
        port: to listen on, of all addresses of this machine.
        endpoint: how the machines call it, for messages.
        job: job id; machines of other jobs are refused.
        secret: of the job; machines that do not have it are refused. Empty: only those that have one.

    Raises:
        OSError: the port cannot be opened.
    """

    def __init__(self, port: int, endpoint: str, job: str, coordinator: Coordinator, secret: str = "") -> None:
        self._endpoint, self._job, self._coordinator, self._secret = endpoint, job, coordinator, secret
        self._unproved: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not proved yet that they have the secret, in the order of arrival."""
        self._max_unproved = coordinator.max_nodes + _SPARE_CONNECTIONS
        self._warned: set[str] = set()
        """Addresses of which it was said that they do not have the secret."""
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._digests: dict[str, str] = {}
        """Key of a machine -> digest of its facts."""
        self._facts: dict[str, Mapping[str, Any]] = {}
        """Digest -> facts about machines."""
        self._offers: dict[str, Offer] = {}
        """Key of a machine -> what it offered when it joined last."""
        self._reference = ""
        """Digest of the facts of the first round's first machine."""
        self._done: set[str] = set()
        self._reminded_at = time.monotonic()
        self._loop = asyncio.new_event_loop()
        allow_open_files(coordinator.max_nodes + self._max_unproved + _SPARE_FILES)
        self._socket = _open_port(port)
        self._is_serving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rendezvous")
        self._thread.start()
        self._is_serving.wait(_STOP_SECONDS)

    def close_job(self) -> None:
        """Say that the job has ended, ahead of a `stop`: a message over the network may still be unread then."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._coordinator.close)

    def stop(self) -> None:
        """Send what is to be sent and close all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = asyncio.start_server(self._serve, sock=self._socket, limit=MAX_LINE_BYTES, backlog=_BACKLOG)
        server = self._loop.run_until_complete(serving)
        ticking = self._loop.create_task(self._tick_forever())
        ticking.add_done_callback(self._stop_after_error)
        self._is_serving.set()
        self._loop.run_forever()
        if ticking.done():
            sys.stderr.write(f"error: the rendezvous on machine 0 failed: {ticking.exception()!r}\n")
        else:
            self._report(self._coordinator.tick())
            ticking.cancel()
        server.close()
        self._loop.run_until_complete(self._close_connections())
        self._loop.close()

    def _stop_after_error(self, ticking: asyncio.Task[None]) -> None:
        """End all connections, so that every machine learns that nobody decides any more."""
        if not ticking.cancelled():
            self._loop.stop()

    async def _close_connections(self) -> None:
        for writer in list(self._writers.values()):
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.drain(), 1.0)
            writer.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        key = ""
        lines = _LineReader(reader)
        self._unproved[writer] = None
        if len(self._unproved) > self._max_unproved:
            oldest = next(iter(self._unproved))  # a machine proves itself in an instant: this is none
            del self._unproved[oldest]
            oldest.transport.abort()
        try:
            key, problem = await asyncio.wait_for(self._greet(lines, writer), _GREETING_SECONDS)
            if problem:
                _write(writer, {"kind": "refused", "lines": [problem]})
                await writer.drain()
                return
            _write(writer, {"kind": "welcome"})
            while line := await lines.read_line(MAX_LINE_BYTES):
                self._handle_message(key, parse_object(line))
        except (ValueError, OSError, asyncio.TimeoutError):
            return  # another program, or a connection that broke
        except asyncio.CancelledError:
            return  # the server stops; before Python 3.12 asyncio logs a connection that ends by it as an error
        finally:
            self._unproved.pop(writer, None)
            if key and self._writers.get(key) is writer:
                del self._writers[key]
                self._coordinator.miss(key)
            writer.close()

    async def _greet(self, lines: _LineReader, writer: asyncio.StreamWriter) -> tuple[str, str]:
        """Return the key of a machine that takes part, and nothing or why it does not.

        Raises:
            ValueError: another program.
        """
        hello = parse_object(await lines.read_line(MAX_LINE_BYTES))
        if hello.get("protocol") != PROTOCOL:
            version = metadata.version("anabatic")
            return "", f"anabatic is {version} on machine 0 and {_read_text(hello, 'version')} here"
        key, nonces = _read_text(hello, "key"), (_read_text(hello, "nonce"), job_secret.make_secret())
        proof = job_secret.compute_proof(self._secret, job_secret.COORDINATOR, key, nonces)
        _write(writer, {"kind": "challenge", "nonce": nonces[1], "proof": proof})
        answer = parse_object(await lines.read_line(MAX_LINE_BYTES))
        expected = job_secret.compute_proof(self._secret, job_secret.MACHINE, key, nonces)
        if not job_secret.is_proof(answer.get("proof"), expected):
            self._warn_of_stranger(str(writer.get_extra_info("peername", ("",))[0]))
            return "", WRONG_SECRET
        self._unproved.pop(writer, None)
        details = parse_object(await lines.read_line(MAX_FACTS_BYTES))
        if (job := _read_text(details, "job")) != self._job:
            return "", f"--job-id is {self._job} on machine 0 and {job} here"
        facts = parse_facts(details)
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        if digest not in self._facts and len(self._facts) >= _MAX_DISTINCT_FACTS:
            return "", f"the machines have more than {_MAX_DISTINCT_FACTS} different recipes or sets of packages"
        if len(self._writers) >= self._coordinator.max_nodes + self._max_unproved:
            return "", f"{len(self._writers)} machines are here, of {self._coordinator.max_nodes} that can take part"
        self._facts.setdefault(digest, facts)
        self._digests[key], self._writers[key] = digest, writer
        return key, ""

    def _warn_of_stranger(self, address: str) -> None:
        address = address.removeprefix("::ffff:")  # IPv4 on a socket of both families
        if address not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(address)
            sys.stderr.write(f"warning: {address} was refused at {self._endpoint}: it does not have the job's secret\n")

    def _forget_absent(self) -> None:
        """Forget the facts and offers of those who have gone."""
        known = {*self._writers, *self._coordinator.list_known()}
        for key in (self._digests.keys() | self._offers.keys()) - known:
            self._digests.pop(key, None)
            self._offers.pop(key, None)
        for digest in self._facts.keys() - {self._reference, *self._digests.values()}:
            del self._facts[digest]

    def _handle_message(self, key: str, message: dict[str, Any]) -> None:
        self._coordinator.hear(key)
        kind = message.get("kind")
        if kind == "join":
            offer = parse_offer(message)
            self._join(Machine(key, offer.number, offer.address, self._digests[key]), offer)
        elif kind == "missing":
            self._send([key], {"kind": "missing", "text": self._coordinator.describe_missing(self._endpoint)})
        elif kind == "done":
            self._done.add(key)
        elif kind == "leave":
            self._coordinator.leave(key)
        elif kind == "close":
            self._coordinator.close()
        self._tell_all_done()

    def _join(self, machine: Machine, offer: Offer) -> None:
        self._offers[machine.key] = offer
        self._done.discard(machine.key)
        if self._reference and (differences := self._find_differences([machine], "recipe")):
            self._send([machine.key], {"kind": "refused", "lines": differences})
        elif address := self._coordinator.join(machine):
            self._send([machine.key], {"kind": "replaced", "address": address})

    def _tell_all_done(self) -> None:
        """Let go those who have finished, when nobody is left who has not."""
        running = self._coordinator.running
        # Numbers first: this is asked with each message, and most come while few have finished.
        if self._done and len(self._done) >= len(running) and self._done.issuperset(running):
            self._send(self._done, {"kind": "all done"})
            self._done.clear()

    async def _tick_forever(self) -> None:
        while True:
            self._report(self._coordinator.tick())
            if len(self._digests) > len(self._writers):
                self._forget_absent()
            missing = self._coordinator.describe_missing(self._endpoint)
            if not missing or not self._coordinator.waiting:
                self._reminded_at = time.monotonic()
            elif time.monotonic() - self._reminded_at > REMINDER_SECONDS:
                self._reminded_at = time.monotonic()
                sys.stderr.write(f"{missing}\n")
            await asyncio.sleep(_TICK_SECONDS)

    def _report(self, decisions: Decisions) -> None:
        for machine in decisions.lost:
            sys.stderr.write(
                f"warning: {_name(machine)} ({machine.address}) is lost: no sign of life for {LOST_SECONDS:g} s, or its"
                " connection broke\n"
            )
        for machine in decisions.spares:
            text = f"{_name(machine)} ({machine.address}) is a spare: it waits until a place is free"
            sys.stderr.write(f"{text}\n")
            self._send([machine.key], {"kind": "spare", "text": text})
        for key, address in decisions.replaced.items():
            self._send([key], {"kind": "replaced", "address": address})
        self._send(decisions.closed, {"kind": "closed"})
        if decisions.is_over:
            self._send(self._coordinator.running, {"kind": "over", "round": self._coordinator.round})
        if decisions.lost:
            self._tell_all_done()
        if decisions.meeting is not None:
            self._start_workers(decisions.meeting)

    def _start_workers(self, meeting: Meeting) -> None:
        if not self._reference:
            self._reference = meeting.machines[0].digest
        if differences := self._find_differences(meeting.machines, "recipe"):
            self._send([machine.key for machine in meeting.machines], {"kind": "refused", "lines": differences})
            return
        for line in self._find_differences(meeting.machines, "versions"):
            sys.stderr.write(f"warning: {line}\n")
        offers = [self._offers[machine.key] for machine in meeting.machines]
        common = {
            "kind": "round",
            "round": meeting.round,
            "size": len(offers),
            "world_size": sum(offer.nproc for offer in offers),
            "master_addr": meeting.machines[0].address,
            "master_port": offers[0].port,
        }
        first_rank = 0
        for rank, (machine, offer) in enumerate(zip(meeting.machines, offers, strict=True)):
            self._send([machine.key], {**common, "rank": rank, "first_rank": first_rank})
            first_rank += offer.nproc

    def _find_differences(self, machines: Iterable[Machine], part: str) -> list[str]:
        """Return what differs from the first round's first machine."""
        others = {
            _name(machine): self._facts[machine.digest] for machine in machines if machine.digest != self._reference
        }
        return describe_differences(self._facts[self._reference], others, part)[:_MAX_REFUSALS] if others else []

    def _send(self, keys: Iterable[str], message: Mapping[str, Any]) -> None:
        for key in keys:
            if (writer := self._writers.get(key)) is not None:
                _write(writer, message)


WRONG_SECRET = f"{job_secret.VARIABLE} on machine 0 and here differ"


class _LineReader:
    """Reads lines from a connection; its cost is that of the bytes, however they come."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._rest = reader, bytearray()

    async def read_line(self, max_bytes: int) -> bytes:
        """Return the next line with its end; what is left where the connection ends.

        Raises:
            ValueError: the line is longer than `max_bytes`.
        """
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            searched = len(self._rest)
            if searched > max_bytes:
                raise ValueError(f"a line of more than {max_bytes} bytes")
            if not (block := await self._reader.read(_BLOCK_BYTES)):
                break
            self._rest += block
        length = end + 1 if end >= 0 else len(self._rest)
        line = bytes(self._rest[:length])
        del self._rest[:length]
        return line


def _write(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def _open_port(port: int) -> socket.socket:
    """Listen on all addresses of both families, or of IPv4 where there is no other."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _name(machine: Machine) -> str:
    return f"machine {machine.number}" if machine.number is not None else f"the machine at {machine.address}"
