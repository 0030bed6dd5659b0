"""The process that keeps an interpreter warm, and forks one that is shut in for every program.

It is started by `box.Sandbox` with one end of a pair of sockets; messages are JSON behind their length. It knows
nothing but what it is sent, and ends with the one who started it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any, NoReturn

from anabatic.sandbox import inside, namespaces, places, seccomp, system
from anabatic.sandbox.channel import receive, send
from anabatic.sandbox.follow import END, Run
from anabatic.sandbox.limits import Limits
from anabatic.sandbox.way import CHROOT, LANDLOCK, NAMESPACES, Way

_WARM = ("ast", "collections", "functools", "heapq", "itertools", "json", "math", "random", "re", "string", "typing")
"""Modules that many programs import."""
_LIBRARY = (
    "abc", "argparse", "array", "asyncio", "base64", "binascii", "bisect", "calendar", "cmath", "concurrent.futures",
    "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime", "decimal", "difflib", "encodings.ascii",
    "encodings.idna", "encodings.latin_1", "encodings.utf_16", "enum", "fractions", "glob", "gzip", "hashlib",
    "html", "inspect", "io", "logging", "multiprocessing.pool", "numbers", "operator", "pathlib", "pickle", "platform",
    "pprint", "queue", "secrets", "select", "shlex", "shutil", "socket", "statistics", "string", "struct", "subprocess",
    "tempfile", "textwrap", "threading", "timeit", "tokenize", "unicodedata", "unittest.mock", "urllib.parse", "uuid",
    "weakref", "xml.etree.ElementTree", "zlib", "zoneinfo",
)  # fmt: skip
"""What programs may import where they see no files of Python's."""


def main(handle: int, name: str, more: list[str]) -> NoReturn:
    """Answer until the channel is closed."""
    channel = socket.socket(fileno=handle)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # meant for the job, not for programs
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # whoever started us may have blocked some
    sys.executable = os.path.realpath(sys.executable)  # programs do not see the link in a virtual environment
    for module in _WARM:
        importlib.import_module(module)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # should the machine run out of memory, programs go first
    try:
        way = _prepare(name, more)
    except OSError as error:
        send(channel, {"refused": error.strerror or str(error)})
        os._exit(0)
    send(channel, {"way": name, "guards": way.guards})
    gc.collect()
    gc.freeze()
    while (message := receive(channel)) is not None:
        if END not in message:  # that one came when its program had just ended by itself
            send(channel, _answer(way, channel, message))
    os._exit(0)


def _prepare(name: str, more: list[str]) -> Way:
    way = Way(name, readable=places.readable(more), filtered=_can_filter())
    if name == NAMESPACES:
        way.own, way.processes = namespaces.enter(way.readable)
        way.guards = {"network": "network namespace", "files": "mount namespace"}
        if way.processes is not None:
            way.guards["processes"] = "process namespace, RLIMIT_NPROC"
        elif way.filtered:
            way.guards["processes"] = "process namespace, none may be started"
    else:
        if files := _FILES.get(name):
            way.guards["files"] = files()
        if way.filtered:
            way.guards |= {"network": "seccomp", "processes": "seccomp, none may be started"}
    if way.filtered:
        way.guards["calls"] = "seccomp"
    return way


def _landlock() -> str:
    if not system.landlock_version():
        raise OSError("this kernel has no Landlock")
    return f"Landlock {system.landlock_version()}"


def _chroot() -> str:
    """In its empty folder a program can import only what is there already."""
    for module in _LIBRARY:
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
    return "chroot and a user of their own"


_FILES = {LANDLOCK: _landlock, CHROOT: _chroot}
"""Way -> finds out whether it keeps files, and says how.

Raises:
    OSError: it does not.
"""


def _can_filter() -> bool:
    """Try the filter in a process of its own."""
    if seccomp.machine() is None:
        return False
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            system.no_new_privileges()
            system.install_filter(seccomp.program(os.getpid()))
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _answer(way: Way, channel: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
    """Run one program; return the fields of its `Outcome`, or what kept it from starting."""
    limits = Limits(**message["limits"])
    folder = None if way.name == NAMESPACES else tempfile.mkdtemp(prefix="anabatic-")
    if way.name == CHROOT and folder is not None:
        os.chown(folder, namespaces.USER, namespaces.USER)
    stdin = os.memfd_create("stdin")
    os.write(stdin, message["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    # Before the pipes: of its ends to the other part of a judged program this process keeps none.
    wires = socket.recv_fds(channel, 1, 2)[1] if "part" in message else []
    pipes = [os.pipe() for _ in range(3)]
    nonce = os.urandom(16)
    began = time.monotonic()
    pid = namespaces.fork_inside(way.own) if way.name == NAMESPACES else os.fork()
    if pid == 0:
        inside.begin(way, limits, message, [stdin, *(end for _, end in pipes), *wires], nonce, folder)
    for handle in (stdin, *(end for _, end in pipes), *wires):
        os.close(handle)
    run = Run(limits, pid, [end for end, _ in pipes], nonce)
    try:
        run.follow(channel)
        return run.outcome(began)
    finally:
        if folder is not None:
            _remove(folder)


def _remove(folder: str) -> None:
    """Remove a program's folder, whatever it has made of it."""
    for root, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder)
