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

from anabatic.core import child
from anabatic.core.stopping import SIGNALS

PRELOAD = "ANABATIC_PRELOAD"
"""Environment variable: the modules that the server imports, with commas between; none, no server."""
WORDS = (sys.executable, "-u", "-m", "anabatic")
"""How the command line of a worker begins that can be forked: the agent of torch 2.13 writes `-u`."""
_ACCELERATORS = ("nvidiactl", "davinci_manager", "davinci0", "kfd")
"""Devices under /dev by which an accelerator is known to be there."""
_LOOK = 0.01
_PR_SET_NAME = 15


def preload(device: str, recipe: str) -> str:
    """Return the modules to import before the workers are forked; an empty text where they must not be.

    Args:
        device: the setting `device.type`.
        recipe: module of the command's recipe.
    """
    simulated = "ANABATIC_SIM_SEGMENT" in os.environ
    bare = sys.platform == "linux" and not simulated and not any(Path("/dev", name).exists() for name in _ACCELERATORS)
    processor = device == "cpu" or (device == "auto" and bare)
    return f"{recipe},anabatic.cli.app" if processor and sys.platform == "linux" else ""


class Forked:
    """A worker, with the part of `subprocess.Popen` that the agent uses."""

    def __init__(self, server: Forkserver, pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._server.collect()
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
            time.sleep(_LOOK)
        return code


class Forkserver:
    """The agent's end."""

    def __init__(self, modules: str) -> None:
        self._line, theirs = socket.socketpair()
        words = [sys.executable, "-m", "anabatic.launch.forkserver", modules, str(theirs.fileno())]
        with child.shielded():
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        theirs.close()
        self._rest = b""
        self._workers: dict[int, Forked] = {}
        self._made: list[int] = []

    def fork(self, words: Sequence[str], environment: Mapping[str, str]) -> Forked | None:
        """Start a worker; None when the server has ended, as one does that could not import or may not fork."""
        request = json.dumps({"words": list(words), "environment": dict(environment)}) + "\n"
        with contextlib.suppress(OSError):
            self._line.sendall(request.encode())
            while not self._made and self._read(None):
                pass
        if not self._made:
            return None
        pid = self._made.pop()
        return self._workers.setdefault(pid, Forked(self, pid))

    def close(self) -> None:
        """Let the server end, and wait for it."""
        self._line.close()
        self._process.wait()

    def collect(self) -> None:
        """Take in what the server has told meanwhile."""
        while self._read(0.0):
            pass

    def _read(self, timeout: float | None) -> bool:
        """Read once; False when there is nothing, or the server is gone."""
        if not select.select([self._line], [], [], timeout)[0]:
            return False
        try:
            data = self._line.recv(65536)
        except OSError:
            data = b""
        if not data:  # the server has ended, and its workers went with it
            for worker in self._workers.values():
                worker.returncode = -signal.SIGKILL if worker.returncode is None else worker.returncode
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "code" not in told:
                self._made.append(told["pid"])
            elif told["pid"] in self._workers:
                self._workers.pop(told["pid"]).returncode = told["code"]
                with contextlib.suppress(OSError):  # a server that has gone has left nothing to be reaped
                    self._line.sendall(json.dumps({"reap": told["pid"]}).encode() + b"\n")
        return True


def _serve(modules: str, line: socket.socket) -> None:
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
            _tell_ends(line, running)
        if line.fileno() not in ready:
            continue
        data = _receive(line)
        if not data:
            return
        *requests, rest = (rest + data).split(b"\n")
        for request in requests:
            asked = json.loads(request)
            if "reap" in asked:
                os.waitpid(asked["reap"], 0)
                continue
            with child.shielded():
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for number in (signal.SIGCHLD, *SIGNALS):
                        signal.signal(number, signal.SIG_DFL)
                    for one in (line.detach(), waker, waken):
                        os.close(one)
                    _become(asked["words"], asked["environment"])
            running.add(pid)
            _tell(line, {"pid": pid})


def _receive(line: socket.socket) -> bytes:
    """Return what the agent asks next; nothing once it has ended."""
    try:
        return line.recv(65536)
    except ConnectionResetError:  # it was killed with an answer unread
        return b""


def _tell_ends(line: socket.socket, running: set[int]) -> None:
    """Tell which of the running workers have ended, and leave them to be reaped."""
    for pid in sorted(running):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            running.discard(pid)
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            _tell(line, {"pid": pid, "code": code})


def _tell(line: socket.socket, what: dict[str, Any]) -> None:
    line.sendall((json.dumps(what) + "\n").encode())


def _become(words: list[str], environment: dict[str, str]) -> None:
    """Be the worker: run the command as `python -m anabatic` does, and end."""
    os.setsid()  # the agent signals its group
    os.environ.clear()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"python rank {environment.get('RANK', '')}".encode(), 0, 0, 0)
    if child.reports() is None:  # a worker listens as soon as it runs, and takes in what has come since the fork
        child.admit_signals()
    sys.argv = ["anabatic", *words]
    runpy.run_module("anabatic", run_name="__main__", alter_sys=True)
    sys.exit(0)


def _run() -> None:
    child.outlive_signals()
    child.die_with_parent()
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))


if __name__ == "__main__":
    _run()
