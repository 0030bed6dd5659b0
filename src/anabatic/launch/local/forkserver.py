"""A server that imports the workers' modules once and forks workers: ranks, those of restarts, and stages of pipelines.

Name and idea are those of `multiprocessing`'s forkserver (Python documentation, "Contexts and start methods"). It is
used on CPUs and on simulated NPUs: forks with an accelerator's driver loaded are untested. A fork copies only the
calling thread, so the server exits if an import has started threads or has initialized a device.

Its user, the agent or the pipeline, and the server are connected by a pair of sockets with lines of JSON: `{"words",
"environment"}` and `{"reap"}` to the server, `{"pid"}` and `{"pid", "code"}` back. The server reaps a worker only after
its user knows that it ended, because that signals the process groups of workers that it believes to run. Server and
workers end with their user.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.core import cpu_info, relaunch
from anabatic.core.formatting import parse_whole
from anabatic.core.stop_signals import STOP_SIGNALS

PRELOAD_VARIABLE = "ANABATIC_PRELOAD"
"""Environment variable: the modules that the server imports, separated by commas; empty: no server."""
WORKER_COMMAND = (sys.executable, "-u", "-m", "anabatic")
"""Start of the command line of a worker that can be forked: the agent of torch 2.13 adds `-u`."""
SIMULATION_VARIABLE = "ANABATIC_SIM_SEGMENT"
"""Set inside of `anabatic sim`, whose NPUs are memory of this machine."""
_ACCELERATOR_FILES = ("nvidiactl", "davinci_manager", "davinci0", "kfd")
"""Devices under /dev that indicate an accelerator."""
_OF_SEVERAL_RANKS = "torch.distributed.checkpoint,torch.distributed.fsdp"
"""Modules that ranks use and that one process imports when it needs them."""
_WAIT_SECONDS = 1.0
_PR_SET_NAME = 15


def list_preload_modules(device: str, recipe: str) -> str:
    """Return the modules to import before the workers are forked; empty if they must not be forked.

    Args:
        device: the setting `device.type`.
        recipe: module with the command's recipe.
    """
    return f"{recipe},anabatic.cli.app,{_OF_SEVERAL_RANKS}" if is_forkable(device) else ""


def is_forkable(device: str) -> bool:
    """Return whether processes for the setting `device.type` may be forked.

    Those on a processor and on simulated NPUs may, on Linux.
    """
    if sys.platform != "linux":
        return False
    if SIMULATION_VARIABLE in os.environ:
        return device in ("cpu", "auto", "npu")
    has_accelerator = any(Path("/dev", name).exists() for name in _ACCELERATOR_FILES)
    return device == "cpu" or (device == "auto" and not has_accelerator)


class ForkedWorker:
    """A forked worker, with the part of `subprocess.Popen` that the agent uses."""

    def __init__(self, server: Forkserver, pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._server.collect_exits()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the worker to end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = _WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            self._server.wait_for_message(min(left, _WAIT_SECONDS))
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the end of the worker is known; signal handlers may call it."""
        if self.returncode is None:
            os.kill(self.pid, number)  # the number is the worker's until `poll` has told its end


class Forkserver:
    """The agent's side of the forkserver."""

    def __init__(self, modules: str) -> None:
        self._socket, server_socket = socket.socketpair()
        command = [sys.executable, "-m", "anabatic.launch.local.forkserver", modules, str(server_socket.fileno())]
        with relaunch.block_group_signals():
            self._process = subprocess.Popen(command, pass_fds=[server_socket.fileno()], stdin=subprocess.DEVNULL)
        server_socket.close()
        self._buffer = b""
        self._workers: dict[int, ForkedWorker] = {}
        self._forked: list[ForkedWorker] = []

    def fork_worker(
        self, arguments: Sequence[str], environment: Mapping[str, str], is_program: bool = False
    ) -> ForkedWorker | None:
        """Start a worker; None if the server has ended, because an import failed or it cannot fork.

        Args:
            is_program: the arguments are those of `python -u`, not of the command line.
        """
        worker = {"words": list(arguments), "environment": dict(environment), "is_program": is_program}
        request = json.dumps(worker) + "\n"
        with contextlib.suppress(OSError):
            self._socket.sendall(request.encode())
            while not self._forked and self._read_messages(None):
                pass
        return self._forked.pop() if self._forked else None

    def close(self) -> None:
        """End the server, also in the middle of its imports."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def collect_exits(self) -> None:
        """Process all pending messages of the server."""
        while self._read_messages(0.0):
            pass

    def wait_for_message(self, seconds: float) -> None:
        """Wait until a worker may have ended, at most so long."""
        select.select([self._socket], [], [], seconds)

    def _read_messages(self, timeout: float | None) -> bool:
        """Read once; False if there is no message or the server has ended."""
        if not select.select([self._socket], [], [], timeout)[0]:
            return False
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:  # the server has ended, and its workers with it
            for worker in self._workers.values():
                worker.returncode = -signal.SIGKILL if worker.returncode is None else worker.returncode
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "code" not in message:  # known at once: the message of its end may have come with this one
                self._workers[message["pid"]] = ForkedWorker(self, message["pid"])
                self._forked.append(self._workers[message["pid"]])
            elif message["pid"] in self._workers:
                self._workers.pop(message["pid"]).returncode = message["code"]
                with contextlib.suppress(OSError):  # a server that has ended leaves nothing to reap
                    self._socket.sendall(json.dumps({"reap": message["pid"]}).encode() + b"\n")
        return True


def _import_modules(modules: str) -> None:
    """Import modules, and names of them, with commas between.

    Raises:
        SystemExit: a fork would not work after it.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command line does before torch is loaded
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's library starts its threads when it is loaded
    if "anabatic." in modules:
        cpu_info.install_quick_imports()
    with _unopened_devices():
        for name in modules.split(","):
            module, _, attribute = name.partition(":")
            getattr(importlib.import_module(module), attribute or "__name__", None)  # transformers imports on demand
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("anabatic: an import has started a thread, so workers are not forked")


def _serve_forks(modules: str, connection: socket.socket) -> None:
    """Import the modules, then fork on request until the agent closes the connection."""
    _import_modules(modules)
    gc.collect()
    gc.freeze()  # a collection would copy the shared pages
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    os.set_blocking(wakeup_read, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    buffer, running = b"", set[int]()
    while True:
        ready, _, _ = select.select([connection.fileno(), wakeup_read], [], [])
        if wakeup_read in ready:
            os.read(wakeup_read, 4096)
            _report_exits(connection, running)
        if connection.fileno() not in ready:
            continue
        data = _receive_request(connection)
        if not data:
            return
        *requests, buffer = (buffer + data).split(b"\n")
        for request in requests:
            message = json.loads(request)
            if "reap" in message:
                os.waitpid(message["reap"], 0)
                continue
            group_read, group_write = os.pipe()
            with relaunch.block_group_signals():
                pid = os.fork()
                if pid == 0:
                    os.setsid()  # the agent signals its group
                    os.close(group_write)
                    signal.set_wakeup_fd(-1)
                    for signum in (signal.SIGCHLD, *STOP_SIGNALS):
                        signal.signal(signum, signal.SIG_DFL)
                    for descriptor in (connection.detach(), wakeup_read, wakeup_write, group_read):
                        os.close(descriptor)
                    run = _run_program if message["is_program"] else _run_worker_command
                    run(message["words"], message["environment"])
            os.close(group_write)
            os.read(group_read, 1)  # returns once the group exists: a signal to it may follow the answer at once
            os.close(group_read)
            running.add(pid)
            _send_message(connection, {"pid": pid})


@contextlib.contextmanager
def _unopened_devices() -> Iterator[None]:
    """Keep imports from asking a simulated NPU: its answers depend on variables of each worker.

    Raises:
        SystemExit: an import has initialized the device.
    """
    if SIMULATION_VARIABLE not in os.environ:
        yield
        return
    npu: Any = importlib.import_module("torch").npu
    is_available = npu.is_available
    npu.is_available = lambda: True
    try:
        yield
    finally:
        npu.is_available = is_available
    if npu.is_initialized():
        raise SystemExit("anabatic: an import has initialized the NPU, so workers are not forked")


def _receive_request(connection: socket.socket) -> bytes:
    """Return the agent's next request; empty once it has ended."""
    try:
        return connection.recv(65536)
    except ConnectionResetError:  # the agent was killed with an answer unread
        return b""


def _report_exits(connection: socket.socket, running: set[int]) -> None:
    """Report which of the running workers have ended, without reaping them."""
    for pid in sorted(running):
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None:
            running.discard(pid)
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            _send_message(connection, {"pid": pid, "code": code})


def _send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())


def _run_worker_command(arguments: list[str], environment: dict[str, str]) -> None:
    """Run the command in the forked worker as `python -m anabatic` does, and exit."""
    relaunch.tie_to_parent()
    os.environ.clear()
    os.environ.update(environment)
    name = f"python rank {environment['RANK']}" if "RANK" in environment else "anabatic"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    if (
        relaunch.get_reports_folder() is None
    ):  # with a report folder, the worker unblocks signals itself when it installs its handlers
        relaunch.unblock_group_signals()
    sys.argv = ["anabatic", *arguments]
    runpy.run_module("anabatic", run_name="__main__", alter_sys=True)
    sys.exit(0)


def _run_program(words: list[str], environment: dict[str, str]) -> None:
    """Run a program in the forked worker as `python -u` does, and exit."""
    relaunch.tie_to_parent()
    threads = parse_whole(environment.get("OMP_NUM_THREADS"), 6)
    if threads and threads != parse_whole(os.environ.get("OMP_NUM_THREADS"), 6) and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)  # libgomp has read its variable when torch was loaded
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    relaunch.unblock_group_signals()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        raw = io.FileIO(stream.fileno(), "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True))
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next  # what the program has to do with
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
    sys.exit(0)


def _run_server() -> None:
    relaunch.ignore_group_signals()
    relaunch.die_with_parent()
    _serve_forks(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))


if __name__ == "__main__":
    _run_server()
