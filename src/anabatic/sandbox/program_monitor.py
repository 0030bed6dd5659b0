"""A program under way, as its zygote sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from anabatic.sandbox.limits import ProgramOutcome, ProgramStatus, ResourceLimits
from anabatic.sandbox.program_folder import ProgramFolder
from anabatic.sandbox.program_process import OUT_OF_MEMORY, TestReport
from anabatic.sandbox.remote_calls import receive_message

END_KEY = "end"
"""Key of the message that ends a program under way: `ok`, its work is done; `memory`, it has taken too much."""
_READ_BYTES = 1 << 16
_MAX_POLL_SECONDS = 3600.0
"""Seconds of one poll(2) at most, whose clock is a C int of milliseconds."""
_FOLDER_POLL_SECONDS = 0.05
"""Seconds between two looks at what a program has written."""
_CPU_LIMIT_EXIT_CODE = 128 + signal.SIGXCPU


class ProgramMonitor:
    """Reads what a program writes, ends it, and says what became of it.

    Args:
        limits: what it may use.
        pid: the process; with it ends all that it has started.
        ends: of the pipes for stdout, stderr, the report of the process, and how its start went.
        nonce: what the report says when the last line was reached.
        folder: its own, whose size is watched.
    """

    def __init__(
        self, limits: ResourceLimits, pid: int, ends: Sequence[int], nonce: bytes, folder: ProgramFolder | None
    ) -> None:
        self._limits, self._pid, self._nonce, self._folder = limits, pid, nonce, folder
        self._stdout, self._stderr, self._report, self._setup = ends
        self._output = {end: bytearray() for end in ends}
        self._open_streams = set(ends)
        self._num_written = 0
        self._status: ProgramStatus = "ok"
        self._is_done = False
        self._next_look = 0.0

    def watch_program(self, channel: socket.socket) -> None:
        """Read until the program ends, its time is over, it has said too much, or the channel says so."""
        deadline = time.monotonic() + self._limits.seconds
        watched = select.poll()
        for end in self._open_streams:
            watched.register(end, select.POLLIN)
        watched.register(channel, select.POLLIN | select.POLLRDHUP)
        while self._status == "ok" and not self._is_done and self._report in self._open_streams:
            left = deadline - time.monotonic()
            if left <= 0:
                self._status = "timeout"
            longest = _MAX_POLL_SECONDS if self._folder is None else _FOLDER_POLL_SECONDS
            events = watched.poll(min(left, longest) * 1000) if left > 0 else []
            for handle, _ in events:
                if handle == channel.fileno():
                    self._handle_message(receive_message(channel))
                    break
                self._read_stream(handle)
                if handle not in self._open_streams:
                    watched.unregister(handle)
            if self._status == "ok" and self._report in self._open_streams:
                self._look_at_process()

    def _look_at_process(self) -> None:
        """Look at the folder from the program's first line on: before, its process may not be looked at. And at its
        threads, which RLIMIT_NPROC does not count for the user that it runs as.
        """
        if self._folder is None or self._setup in self._open_streams or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _FOLDER_POLL_SECONDS
        if self._folder.is_exceeded(self._pid, self._limits.file_mib):
            self._status = "files"
        elif count_threads(self._pid) > self._limits.processes:
            self._status = "error"

    def collect_outcome(self, began: float) -> dict[str, Any]:
        """End all that is left of the program, and return the fields of its `ProgramOutcome`; or `failed`: why it never
        ran.

        Args:
            began: `time.monotonic()` when it was started.
        """
        self._kill_program()
        _, status, used = os.wait4(self._pid, 0)
        _collect_sockets()
        for end in tuple(self._output):
            os.set_blocking(end, False)
            with contextlib.suppress(BlockingIOError):
                while end in self._open_streams and self._status != "output":
                    self._read_stream(end)
            os.close(end)
        code, report = os.waitstatus_to_exitcode(status), bytes(self._output[self._report])
        code = 128 - code if code < 0 else code
        setup: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # it was ended while it said it
            setup = json.loads(self._output[self._setup])
        if "failed" in setup:
            return setup
        if self._is_done and self._status == "ok":
            code = 0
        if self._status == "ok" and code:
            self._status = (
                "timeout" if code == _CPU_LIMIT_EXIT_CODE else "memory" if report == OUT_OF_MEMORY else "error"
            )
        stdout, stderr = (self._output[end].decode(errors="replace") for end in (self._stdout, self._stderr))
        seconds, cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
        said = report[len(self._nonce) :].decode(errors="replace") if report.startswith(self._nonce) else None
        finished = said in get_args(TestReport) and self._status == "ok"
        memory, written = used.ru_maxrss / 1024, self._num_written
        outcome = ProgramOutcome(self._status, finished, stdout, stderr, written, code, seconds, cpu, memory)
        return {
            **asdict(outcome),
            "reaches": setup.get("reaches", []),
            "shares": setup.get("shares", False),
            "test_report": said if finished else "",
        }

    def _handle_message(self, message: dict[str, Any] | None) -> None:
        if message is None:  # nobody waits for the answer any more
            self._kill_program()
            os._exit(0)
        self._status, self._is_done = message[END_KEY], True

    def _read_stream(self, end: int) -> None:
        """Read what is there, and keep what may be kept."""
        data = os.read(end, _READ_BYTES)
        output = self._output[end]
        if not data:
            self._open_streams.discard(end)
        if end in (self._stdout, self._stderr):
            self._num_written += len(data)
        room = self._limits.output_bytes - len(output)
        output += data[:room]
        if len(data) > room:
            self._status = "output"

    def _kill_program(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _collect_sockets() -> None:
    """Let the kernel free sockets that hold each other, and what else a program has sent through them.

    It looks for them when a socket of this kind is closed (net/unix/garbage.c), wherever; until then they keep the ends
    of its pipes open.
    """
    for end in socket.socketpair():
        end.close()


def count_threads(pid: int) -> int:
    """Return the threads of a process (proc_pid_status(5)); 0: it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return int(file.read().partition("\nThreads:")[2].split(maxsplit=1)[0])
    except (OSError, IndexError):
        return 0
