"""A machine's connection to the coordinator of its job (`coordinator_server.py`)."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from anabatic.launch import job_secret
from anabatic.launch.coordinator import LOST_SECONDS
from anabatic.launch.coordinator_server import PROTOCOL, WRONG_SECRET

_BEAT_SECONDS = LOST_SECONDS / 3
_RETRY_SECONDS = 0.5
_MAX_ANSWER_BYTES = 1 << 20
"""Most bytes of a line of machine 0."""
_ATTEMPT_SECONDS = 10.0
"""Timeout of one connection, and of its first answer."""


class CoordinatorLost(Exception):
    """Machine 0 cannot be reached any more, or another program answers there."""


class _Silence(CoordinatorLost):
    """What listens there has not answered."""


class CoordinatorTimeout(Exception):
    """The other machines did not come in time; the message names them."""


class CoordinatorClient:
    """One connection, from its opening to its end.

    Args:
        host, port: of machine 0.
        key: name of this process, which no other has.
        facts: about this machine, compared with those of the others.
        seconds: timeout for machine 0 to answer.
        secret: of the job; empty: it has none.

    Raises:
        CoordinatorLost: it does not answer, or is another program.
    """

    def __init__(
        self, host: str, port: int, job: str, key: str, facts: Mapping[str, Any], seconds: float, secret: str = ""
    ) -> None:
        self._changed = threading.Condition()
        self._answer: dict[str, Any] | None = None
        self._round = 0
        self._is_spare = False
        self._is_over = self._are_all_done = False
        self._lost = ""
        self._send_lock = threading.Lock()
        self._greeting = {"protocol": PROTOCOL, "version": metadata.version("anabatic")}
        self._secret, self._key, self._details = secret, key, {"job": job, "facts": dict(facts)}
        deadline = time.monotonic() + seconds
        while (refused := self._greet(host, port, deadline)) is None:
            pass
        self._refused = refused
        self._receiver: threading.Thread | None = None
        if not self._refused:
            self._receiver = threading.Thread(target=self._receive, daemon=True, name="rendezvous-client")
            self._receiver.start()

    def _greet(self, host: str, port: int, deadline: float) -> list[str] | None:
        """Connect; return why machine 0 does not want this machine, empty if it does, None to try again."""
        self._socket = _connect(host, port, deadline)
        self._reader = _LineReader(self._socket)
        try:
            refused = self._prove()
        except _Silence:
            self._socket.close()
            if time.monotonic() > deadline:
                raise
            return None  # machine 0 has not come to it: many start at once
        except CoordinatorLost:
            self._socket.close()
            raise
        if refused:
            self._socket.close()
        return refused

    def _prove(self) -> list[str]:
        """Show machine 0 that this machine has the secret, once it has shown that it has it."""
        nonce = job_secret.make_secret()
        self._send({**self._greeting, "key": self._key, "nonce": nonce})
        challenge = self._reader.read_line(_ATTEMPT_SECONDS)
        if challenge.get("kind") == "challenge":
            nonces = (nonce, str(challenge.get("nonce")))
            expected = job_secret.compute_proof(self._secret, job_secret.COORDINATOR, self._key, nonces)
            if not job_secret.is_proof(challenge.get("proof"), expected):
                return [WRONG_SECRET]
            proof = job_secret.compute_proof(self._secret, job_secret.MACHINE, self._key, nonces)
            self._send({"proof": proof})
            self._send(self._details)
            challenge = self._reader.read_line(_ATTEMPT_SECONDS)
        if challenge.get("kind") == "refused" and isinstance(challenge.get("lines"), list):
            return [str(line) for line in challenge["lines"]]
        if challenge.get("kind") != "welcome":
            raise CoordinatorLost(OTHER_PROGRAM)
        return []

    def join(self, number: int | None, address: str, port: int, nproc: int, seconds: float) -> dict[str, Any]:
        """Take part in the next round and return the answer: its `kind` is `round`, `refused`, `replaced` or `closed`.

        Args:
            number: this machine's; None: the order of arrival decides.
            address, port: where workers could meet if this machine is the first.
            nproc: number of workers here.
            seconds: timeout for the others to come; a spare waits until the job ends.

        Raises:
            CoordinatorTimeout: they did not; CoordinatorLost: machine 0 is lost.
        """
        if self._refused:
            return {"kind": "refused", "lines": self._refused}
        deadline = time.monotonic() + seconds
        with self._changed:
            self._answer, self._are_all_done, self._is_spare = None, False, False
        self._send({"kind": "join", "number": number, "address": address, "port": port, "nproc": nproc})
        answer = self._wait(lambda: self._answer, deadline)
        if answer is None:
            self._send({"kind": "missing"})
            answer = self._wait(lambda: self._answer, time.monotonic() + _ATTEMPT_SECONDS)
        if answer is None or answer["kind"] == "missing":
            raise CoordinatorTimeout((answer or {}).get("text") or "waiting for the other machines")
        return dict(answer)

    def is_over(self) -> bool:
        """Return whether the round is to be left, so that another one can begin.

        Raises:
            CoordinatorLost: machine 0 is lost.
        """
        if self._lost:
            raise CoordinatorLost(self._lost)
        return self._is_over

    def wait_for_all(self, seconds: float) -> bool:
        """Say that this machine has finished, and wait until all have; return False after a timeout.

        Raises:
            CoordinatorLost: machine 0 is lost.
        """
        self._send({"kind": "done"})
        return bool(self._wait(lambda: self._are_all_done, time.monotonic() + seconds))

    def close_job(self) -> None:
        """Say that the job has ended: no further round begins.

        Raises:
            CoordinatorLost: machine 0 is lost.
        """
        self._send({"kind": "close"})

    def leave(self) -> None:
        """Say that this machine goes, and end the connection."""
        try:
            self._send({"kind": "leave"})
        except CoordinatorLost:
            return
        finally:
            with suppress(OSError):  # machine 0 has ended it before
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._receiver is not None:
                self._receiver.join(_ATTEMPT_SECONDS)
            self._socket.close()

    def _wait(self, condition: Any, deadline: float) -> Any:
        """Wait for a value that counts as true; None after the deadline."""
        with self._changed:
            while not (value := condition()):
                if self._lost:
                    raise CoordinatorLost(self._lost)
                left = deadline - time.monotonic()
                if left <= 0 and not self._is_spare:
                    return None
                self._changed.wait(min(left, 1.0) if left > 0 else 1.0)  # in pieces: Python handles signals in between
            return value

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            with self._send_lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise CoordinatorLost(
                self._lost or f"the connection to machine 0 broke: {error.strerror or error}"
            ) from error

    def _receive(self) -> None:
        """Take what machine 0 sends, and give it a sign of life."""
        try:
            while True:
                message = self._reader.read_line(_BEAT_SECONDS, self._send_heartbeat)
                with self._changed:
                    if message["kind"] == "over":
                        self._is_over |= message["round"] == self._round
                    elif message["kind"] == "all done":
                        self._are_all_done = True
                    elif message["kind"] == "spare":
                        self._is_spare = True
                        sys.stderr.write(f"{message['text']}\n")
                    elif message["kind"] != "missing" or self._answer is None:
                        self._answer = {**message, "was_spare": self._is_spare}
                        self._round, self._is_over, self._is_spare = message.get("round", 0), False, False
                    self._changed.notify_all()
        except (CoordinatorLost, KeyError, TypeError) as error:
            with self._changed:
                self._lost = str(error)
                self._changed.notify_all()

    def _send_heartbeat(self) -> None:
        self._send({"kind": "beat"})


OTHER_PROGRAM = "what answers there is another program, no training"


class _LineReader:
    """Reads lines of JSON objects from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""

    def read_line(self, seconds: float, on_timeout: Any = None) -> dict[str, Any]:
        """Return the next object; after each timeout call `on_timeout`, if there is one.

        Raises:
            CoordinatorLost: the connection ended, or what came is none of ours.
        """
        self._connection.settimeout(seconds)
        while b"\n" not in self._rest:
            try:
                received = self._connection.recv(65536)
            except TimeoutError:
                if on_timeout is None:
                    raise _Silence("what listens there does not answer: another program, or too busy") from None
                on_timeout()
                continue
            except OSError as error:
                raise CoordinatorLost(f"the connection to machine 0 broke: {error.strerror or error}") from error
            self._rest += received
            if not received:
                raise CoordinatorLost("machine 0 has ended the connection" if on_timeout else OTHER_PROGRAM)
            if len(self._rest) > _MAX_ANSWER_BYTES:
                raise CoordinatorLost(OTHER_PROGRAM)
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CoordinatorLost(OTHER_PROGRAM) from error
        if not isinstance(message, dict):
            raise CoordinatorLost(OTHER_PROGRAM)
        return message


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=_ATTEMPT_SECONDS)
        except OSError as error:  # machine 0 has not opened it yet
            if time.monotonic() > deadline:
                raise CoordinatorLost(
                    f"machine 0 does not answer at {host}:{port}: {error.strerror or error}"
                ) from error
            time.sleep(_RETRY_SECONDS)
