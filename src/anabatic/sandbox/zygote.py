"""The process that keeps an interpreter warm, and forks one that is isolated for every program.

It is started by `sandbox_runner.Sandbox` with one end of a pair of sockets; messages are JSON behind their length. It
knows nothing but what it is sent, and ends with the one who started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from anabatic.sandbox import child_setup
from anabatic.sandbox.isolation import landlock, namespaces, seccomp, syscalls
from anabatic.sandbox.isolation.modes import CHROOT, LANDLOCK, NAMESPACES, IsolationState
from anabatic.sandbox.limits import ResourceLimits
from anabatic.sandbox.program_folder import ProgramFolder, read_written_bytes
from anabatic.sandbox.program_monitor import END_KEY, ProgramMonitor
from anabatic.sandbox.remote_calls import receive_message, send_message

_PRELOADED_MODULES = (
    "ast",
    "collections",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "random",
    "re",
    "string",
    "typing",
)
"""Modules that many programs import."""
_CHROOT_MODULES = (
    "_strptime", "abc", "argparse", "array", "asyncio", "base64", "binascii", "bisect", "calendar", "cmath",
    "colorsys", "concurrent.futures.thread", "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime",
    "decimal", "difflib", "encodings.ascii", "encodings.cp1252", "encodings.gb18030", "encodings.gbk",
    "encodings.idna", "encodings.latin_1", "encodings.unicode_escape", "encodings.utf_16", "encodings.utf_16_be",
    "encodings.utf_16_le", "encodings.utf_32", "encodings.utf_8_sig", "enum", "fractions", "glob", "graphlib",
    "gzip", "hashlib", "html", "inspect", "io", "logging", "multiprocessing.pool", "numbers", "operator", "pathlib",
    "pickle", "platform", "pprint", "queue", "sched", "secrets", "select", "shlex", "shutil", "socket",
    "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "timeit", "tokenize",
    "unicodedata", "unittest._log", "unittest.async_case", "unittest.mock", "urllib.parse", "uuid", "weakref",
    "xml.etree.ElementTree", "zlib", "zoneinfo",
)  # fmt: skip
"""Modules that programs may import without access to Python's files."""


def main(handle: int, name: str, more: list[str]) -> NoReturn:
    """Answer until the channel is closed."""
    channel = socket.socket(fileno=handle)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # meant for the job, not for programs
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whoever started us may have blocked some
    sys.executable = os.path.realpath(sys.executable)  # programs do not see the link in a virtual environment
    for module in _PRELOADED_MODULES:
        importlib.import_module(module)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # should the machine run out of memory, programs go first
    try:
        way = _prepare_isolation(name, more)
    except OSError as error:
        send_message(channel, {"refused": error.strerror or str(error)})
        os._exit(0)
    send_message(channel, {"way": name, "guards": way.guards})
    gc.collect()
    gc.freeze()
    while (message := receive_message(channel)) is not None:
        if END_KEY not in message:  # that one came when its program had just ended by itself
            send_message(channel, _run_program(way, channel, message))
    os._exit(0)


def _prepare_isolation(name: str, more: list[str]) -> IsolationState:
    way = IsolationState(name, readable_paths=landlock.list_readable_paths(more), has_seccomp=_can_filter_syscalls())
    if name == NAMESPACES:
        way.namespace_fd, way.extra_processes = namespaces.enter_namespaces(way.readable_paths)
        way.guards = {"network": "network namespace", "files": "mount namespace"}
        if way.extra_processes is not None:
            way.guards["processes"] = "process namespace, RLIMIT_NPROC"
        elif way.has_seccomp:
            way.guards["processes"] = "process namespace, none may be started"
    else:
        way.counts_files = _can_count_files(as_nobody=name == CHROOT)
        if files := _FILE_GUARDS.get(name):
            way.guards["files"] = files()
            if not way.counts_files:
                raise OSError("/proc does not show what a process writes")
        if way.has_seccomp:
            way.guards |= {"network": "seccomp", "processes": "seccomp, none may be started"}
    if way.has_seccomp:
        way.guards["calls"] = "seccomp"
    return way


def _check_landlock() -> str:
    if not syscalls.landlock_version():
        raise OSError("this kernel has no Landlock")
    return f"Landlock {syscalls.landlock_version()}"


def _check_chroot() -> str:
    """In its empty folder a program can import only what is there already."""
    for module in _CHROOT_MODULES:
        importlib.import_module(module)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            os.chroot("/proc")
            namespaces.become_nobody()
            os._exit(0)
        os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise OSError("only root may change its root and its user")
    return "chroot and a separate user"


_FILE_GUARDS = {LANDLOCK: _check_landlock, CHROOT: _check_chroot}
"""Way -> finds out whether it keeps files, and says how.

Raises:
    OSError: it does not.
"""


def _can_count_files(as_nobody: bool) -> bool:
    """Try it with a process that gives up what a program does."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            if as_nobody:
                namespaces.become_nobody()
                syscalls.allow_inspection()
            os.write(ready[1], b".")
            os.close(go[1])
            os.read(go[0], 1)
        os._exit(0)
    os.close(ready[1])
    os.close(go[0])
    try:
        return bool(os.read(ready[0], 1)) and read_written_bytes(child, as_nobody) > 0
    except PermissionError:
        return False
    finally:
        os.close(ready[0])
        os.close(go[1])
        os.waitpid(child, 0)


def _can_filter_syscalls() -> bool:
    """Try the filter in its own process."""
    if seccomp.machine_column() is None:
        return False
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            syscalls.forbid_new_privileges()
            syscalls.install_filter(seccomp.build_filter(os.getpid()))
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _run_program(way: IsolationState, channel: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
    """Run one program; return the fields of its `ProgramOutcome`, or what kept it from starting."""
    limits = ResourceLimits(**message["limits"])
    folder = None if way.mode == NAMESPACES else ProgramFolder(as_nobody=way.mode == CHROOT)
    stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(stdin, message["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    # Before the pipes: of its ends to the other part of a judged program this process keeps none.
    wires = socket.recv_fds(channel, 1, 2)[1] if message.get("part") in ("program", "tests") else []
    pipes = [os.pipe() for _ in range(4)]
    nonce = os.urandom(16)
    began = time.monotonic()
    pid = namespaces.fork_into_namespace(way.namespace_fd) if way.mode == NAMESPACES else os.fork()
    if pid == 0:
        handles = [stdin, *(end for _, end in pipes), *wires]
        child_setup.start_program(way, limits, message, handles, nonce, folder.path if folder else None)
    for handle in (stdin, *(end for _, end in pipes), *wires):
        os.close(handle)
    run = ProgramMonitor(limits, pid, [end for end, _ in pipes], nonce, folder if way.counts_files else None)
    try:
        run.watch_program(channel)
        return run.collect_outcome(began)
    finally:
        if folder is not None:
            folder.remove_tree()
