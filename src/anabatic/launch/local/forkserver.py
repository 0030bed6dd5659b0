"""A process that has imported what the workers need, and forks them: ranks import once, restarts not at all.

The name and the idea are those of `multiprocessing`'s forkserver (Python documentation, "Contexts and start methods").
For training on processors only: what a driver of an accelerator makes of a fork was not tried. A fork copies the
calling thread alone, so the server refuses when an import has left threads behind.

The agent holds one end of a pair of sockets, the server the other; on it go lines of JSON: `{"words", "environment"}`
and `{"reap"}` one way, `{"pid"}` and `{"pid", "code"}` the other. A worker that has ended keeps its number until the
agent knows of it, because the agent signals the groups of workers whose end it has not heard of. Server and workers end
with the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.core import relaunch
from anabatic.core.stop_signals import STOP_SIGNALS

PRELOAD_VARIABLE = "ANABATIC_PRELOAD"
"""Environment variable: the modules that the server imports, with commas between; none, no server."""
WORKER_COMMAND = (sys.executable, "-u", "-m", "anabatic")
"""How the command line of a worker begins that can be forked: the agent of torch 2.13 writes `-u`."""
_ACCELERATOR_FILES = ("nvidiactl", "davinci_manager", "davinci0", "kfd")
"""Devices under /dev by which an accelerator is known to be there."""
_POLL_SECONDS = 0.01
_PR_SET_NAME = 15


def list_preload_modules(device: str, recipe: str) -> str:
    """Return the modules to import before the workers are forked; an empty text where they must not be.

    Args:
        device: the setting `device.type`.
        recipe: module of the command's recipe.
    """
    simulated = "ANABATIC_SIM_SEGMENT" in os.environ
    bare = (
        sys.platform == "linux"
        and not simulated
        and not any(Path("/dev", name).exists() for name in _ACCELERATOR_FILES)
    )
    processor = device == "cpu" or (device == "auto" and bare)
    return f"{recipe},anabatic.cli.app" if processor and sys.platform == "linux" else ""


class ForkedWorker:
    """A worker, with the part of `subprocess.Popen` that the agent uses."""

    def __init__(self, server: Forkserver, pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._server.collect_exits()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it did not come in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code


class Forkserver:
    """The agent's end."""

    def __init__(self, modules: str) -> None:
        self._socket, theirs = socket.socketpair()
        words = [sys.executable, "-m", "anabatic.launch.local.forkserver", modules, str(theirs.fileno())]
        with relaunch.block_group_signals():
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        theirs.close()
        self._buffer = b""
        self._workers: dict[int, ForkedWorker] = {}
        self._forked_pids: list[int] = []

    def fork_worker(self, words: Sequence[str], environment: Mapping[str, str]) -> ForkedWorker | None:
        """Start a worker; None when the server has ended, as one does that could not import or may not fork."""
        request = json.dumps({"words": list(words), "environment": dict(environment)}) + "\n"
        with contextlib.suppress(OSError):
            self._socket.sendall(request.encode())
            while not self._forked_pids and self._read_messages(None):
                pass
        if not self._forked_pids:
            return None
        pid = self._forked_pids.pop()
        return self._workers.setdefault(pid, ForkedWorker(self, pid))

    def close(self) -> None:
        """Let the server end, and wait for it."""
        self._socket.close()
        self._process.wait()

    def collect_exits(self) -> None:
        """Take in what the server has told meanwhile."""
        while self._read_messages(0.0):
            pass

    def _read_messages(self, timeout: float | None) -> bool:
        """Read once; False when there is nothing, or the server is gone."""
        if not select.select([self._socket], [], [], timeout)[0]:
            return False
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:  # the server has ended, and its workers went with it
            for worker in self._workers.values():
                worker.returncode = -signal.SIGKILL if worker.returncode is None else worker.returncode
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "code" not in told:
                self._forked_pids.append(told["pid"])
            elif told["pid"] in self._workers:
                self._workers.pop(told["pid"]).returncode = told["code"]
                with contextlib.suppress(OSError):  # a server that has gone has left nothing to be reaped
                    self._socket.sendall(json.dumps({"reap": told["pid"]}).encode() + b"\n")
        return True


def _serve_forks(modules: str, line: socket.socket) -> None:
    """Import, then fork on request until the agent closes the line."""
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line sets it before torch is loaded
    for name in modules.split(","):
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("anabatic: an import has started a thread, so workers are not forked")
    gc.collect()
    gc.freeze()  # a collection would copy the pages that all share
    waker, waken = os.pipe()
    os.set_blocking(waken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    rest, running = b"", set[int]()
    while True:
        ready, _, _ = select.select([line.fileno(), waker], [], [])
        if waker in ready:
            os.read(waker, 4096)
            _report_exits(line, running)
        if line.fileno() not in ready:
            continue
        data = _receive_request(line)
        if not data:
            return
        *requests, rest = (rest + data).split(b"\n")
        for request in requests:
            asked = json.loads(request)
            if "reap" in asked:
                os.waitpid(asked["reap"], 0)
                continue
            with relaunch.block_group_signals():
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for number in (signal.SIGCHLD, *STOP_SIGNALS):
                        signal.signal(number, signal.SIG_DFL)
                    for one in (line.detach(), waker, waken):
                        os.close(one)
                    _run_worker_command(asked["words"], asked["environment"])
            running.add(pid)
            _send_message(line, {"pid": pid})


def _receive_request(line: socket.socket) -> bytes:
    """Return what the agent asks next; nothing once it has ended."""
    try:
        return line.recv(65536)
    except ConnectionResetError:  # it was killed with an answer unread
        return b""


def _report_exits(line: socket.socket, running: set[int]) -> None:
    """Tell which of the running workers have ended, and leave them to be reaped."""
    for pid in sorted(running):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            running.discard(pid)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            _send_message(line, {"pid": pid, "code": code})


def _send_message(line: socket.socket, what: dict[str, Any]) -> None:
    line.sendall((json.dumps(what) + "\n").encode())


def _run_worker_command(words: list[str], environment: dict[str, str]) -> None:
    """Be the worker: run the command as `python -m anabatic` does, and end."""
    os.setsid()  # the agent signals its group
    os.environ.clear()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"python rank {environment.get('RANK', '')}".encode(), 0, 0, 0)
    if (
        relaunch.get_reports_folder() is None
    ):  # a worker listens as soon as it runs, and takes in what has come since the fork
        relaunch.unblock_group_signals()
    sys.argv = ["anabatic", *words]
    runpy.run_module("anabatic", run_name="__main__", alter_sys=True)
    sys.exit(0)


def _run_server() -> None:
    relaunch.ignore_group_signals()
    relaunch.die_with_parent()
    _serve_forks(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))


if __name__ == "__main__":
    _run_server()
