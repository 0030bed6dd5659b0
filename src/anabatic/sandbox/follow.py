"""A program under way, as its keeper sees it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from anabatic.sandbox.channel import receive
from anabatic.sandbox.limits import Limits, Outcome, Status
from anabatic.sandbox.program import FAILED, OUT_OF_MEMORY

END = "end"
"""Key of the message that ends a program under way: `ok`, its work is done; `memory`, it has taken too much."""
_PIECE = 1 << 16
_LOOK = 3600.0
"""Seconds of one poll(2) at most, whose clock is a C int of milliseconds."""
_OUT_OF_CPU = 128 + signal.SIGXCPU


class Run:
    """Reads what a program writes, ends it, and says what became of it.

    Args:
        limits: what it may use.
        pid: the process; with it ends all that it has started.
        ends: of the pipes for stdout, stderr and the report of the process.
        nonce: what the report says when the last line was reached.
    """

    def __init__(self, limits: Limits, pid: int, ends: Sequence[int], nonce: bytes) -> None:
        self._limits, self._pid, self._nonce = limits, pid, nonce
        self._stdout, self._stderr, self._report = ends
        self._said = {end: bytearray() for end in ends}
        self._open = set(ends)
        self._written = 0
        self._status: Status = "ok"
        self._done = False

    def follow(self, channel: socket.socket) -> None:
        """Read until the program ends, its time is over, it has said too much, or the channel says so."""
        deadline = time.monotonic() + self._limits.seconds
        watched = select.poll()
        for end in self._open:
            watched.register(end, select.POLLIN)
        watched.register(channel, select.POLLIN | select.POLLRDHUP)
        while self._status == "ok" and not self._done and self._report in self._open:
            left = deadline - time.monotonic()
            if left <= 0:
                self._status = "timeout"
            events = watched.poll(min(left, _LOOK) * 1000) if left > 0 else []
            for handle, _ in events:
                if handle == channel.fileno():
                    self._obey(receive(channel))
                    break
                self._read(handle)
                if handle not in self._open:
                    watched.unregister(handle)

    def outcome(self, began: float) -> dict[str, Any]:
        """End all that is left of the program, and return the fields of its `Outcome`; or `failed`: why it never ran.

        Args:
            began: `time.monotonic()` when it was started.
        """
        self._kill()
        _, status, used = os.wait4(self._pid, 0)
        for end in tuple(self._said):
            while end in self._open and self._status != "output":
                self._read(end)
            os.close(end)
        code, report = os.waitstatus_to_exitcode(status), bytes(self._said[self._report])
        code = 128 - code if code < 0 else code
        if report.startswith(self._nonce + FAILED):
            return {"failed": report[len(self._nonce + FAILED) :].decode(errors="replace")}
        if self._done and self._status == "ok":
            code = 0
        if self._status == "ok" and code:
            self._status = "timeout" if code == _OUT_OF_CPU else "memory" if report == OUT_OF_MEMORY else "error"
        stdout, stderr = (self._said[end].decode(errors="replace") for end in (self._stdout, self._stderr))
        seconds, cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
        finished = report == self._nonce and self._status == "ok"
        return asdict(
            Outcome(self._status, finished, stdout, stderr, self._written, code, seconds, cpu, used.ru_maxrss / 1024)
        )

    def _obey(self, message: dict[str, Any] | None) -> None:
        if message is None:  # nobody waits for the answer any more
            self._kill()
            os._exit(0)
        self._status, self._done = message[END], True

    def _read(self, end: int) -> None:
        """Read what is there, and keep what may be kept."""
        data = os.read(end, _PIECE)
        said = self._said[end]
        if not data:
            self._open.discard(end)
        if end != self._report:
            self._written += len(data)
        room = self._limits.output_bytes - len(said)
        said += data[:room]
        if len(data) > room:
            self._status = "output"

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
