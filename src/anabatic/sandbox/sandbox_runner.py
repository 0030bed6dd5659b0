"""Run programs that nobody has read: `Sandbox().run(source)`. The memory of all their processes is counted from
outside.

A zygote, its own process, holds a warm interpreter and forks it for every program. Programs have no network, no
files but their own folder that is gone afterwards and, read-only, Python's standard library; they end with
everything that they have started. `probe_protections` says what this kernel can do for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from anabatic.core import relaunch
from anabatic.core.errors import DataError, Failure
from anabatic.sandbox.isolation.modes import CHROOT, ISOLATION_MODES, NAMESPACES
from anabatic.sandbox.limits import MIB, ProgramOutcome, ResourceLimits
from anabatic.sandbox.program_monitor import END_KEY
from anabatic.sandbox.remote_calls import receive_message, send_message

REQUIRED_GUARDS = ("network", "files", "processes")
"""Without one of these no program is run, unless `allow_weaker` is set."""
_SOURCE_ROOT = str(Path(__file__).parents[2])
_ZYGOTE_CODE = (
    "import sys; sys.path[0] = sys.argv[1]; from anabatic.sandbox import zygote; del sys.path[0]; "
    "zygote.main(int(sys.argv[2]), sys.argv[3], sys.argv[4:])"
)
_RESOURCES_HINT = "is the machine out of memory or processes?"
_POLL_SECONDS = 0.05
"""Seconds between two looks at the memory of a program under way."""
_GRACE_SECONDS = 1.0
"""Seconds for a program to end when its tests have found it gone."""
_INHERITED_VARIABLES = ("LD_LIBRARY_PATH",)
"""Some interpreters find their library by it."""


@dataclass(frozen=True)
class Protections:
    """Active protections against programs.

    Attributes:
        mode: `namespaces`, `landlock`, or `limits`: processor time, memory, files, and nothing else.
        guards: `network`, `files`, `processes`, `calls` -> what guards it; what is missing is not guarded.
        reasons: better way -> why it cannot be had here.
    """

    mode: str
    guards: dict[str, str]
    reasons: dict[str, str]

    @property
    def missing_guards(self) -> list[str]:
        """Required guards that are missing."""
        return [name for name in REQUIRED_GUARDS if name not in self.guards]


class _Zygote:
    """The process, and this end of the channel to it."""

    def __init__(self, way: str, readable: Sequence[str]) -> None:
        parent_end, child_end = socket.socketpair()
        environment = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
        environment |= {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "PYTHONHASHSEED": "0"}
        words = [
            sys.executable,
            "-s",
            "-S",
            "-B",
            "-c",
            _ZYGOTE_CODE,
            _SOURCE_ROOT,
            str(child_end.fileno()),
            way,
            *readable,
        ]
        with child_end, relaunch.block_group_signals():
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                cwd="/",
                env=environment,
                start_new_session=True,
            )
        self.channel = parent_end
        self.owner_pid = os.getpid()
        self.greeting = receive_message(parent_end)
        self._own_processes = {*list_descendants(self.process.pid)}
        # Before Linux 4.16 the number is that of the whole machine (kernel commit 648845ab7e20).
        self._has_own_sockets = count_sockets(self.process.pid) == 0

    def send_message(self, message: dict[str, Any], handles: Sequence[int] = ()) -> None:
        """Send a message, and handles behind it; that the zygote is gone shows when its answer is read."""
        with contextlib.suppress(OSError):
            send_message(self.channel, message)
            if handles:
                socket.send_fds(self.channel, [b"."], handles)

    def measure_memory(self) -> int:
        """Return the bytes of memory that the program under way holds, with all that it has started."""
        used = measure_used_bytes({*list_descendants(self.process.pid)} - self._own_processes)
        return used + (count_sockets(self.process.pid) * _read_socket_buffer() if self._has_own_sockets else 0)

    def close(self) -> None:
        """End it, with the program that it runs."""
        self.channel.close()
        if os.getpid() == self.owner_pid:
            self.process.wait()


class Sandbox:
    """Runs programs, several at once if asked from several threads.

    Args:
        limits: what each program may use.
        allow_weaker: run programs even where one of `REQUIRED_GUARDS` is not guarded.
        readable: files and folders that programs may read, beside the standard library.
        workers: programs at once.
        ways: how programs may be isolated; the first that works is taken.

    Raises:
        Failure: a needed protection cannot be had here.
    """

    def __init__(
        self,
        limits: ResourceLimits | None = None,
        *,
        allow_weaker: bool = False,
        readable: Sequence[str] = (),
        workers: int = 1,
        ways: Sequence[str] = ISOLATION_MODES,
    ) -> None:
        self.limits = limits or ResourceLimits()
        self._readable = tuple(readable)
        self._idle_zygotes: queue.LifoQueue[list[_Zygote | None]] = queue.LifoQueue(workers)  # for programs, for tests
        self._is_closed = False
        first, self.protections = _start_best_mode(self._readable, ways)
        if self.protections.missing_guards and not allow_weaker:
            first.close()
            raise unprotected_error(self.protections)
        # Only there several processes of a program may add up.
        self._counts_memory = "memory" in self.protections.guards
        for _ in range(workers - 1):
            self._idle_zygotes.put([None, None])
        self._idle_zygotes.put([first, None])

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, source: str, stdin: str = "", files: Mapping[str, str] | None = None, limits: ResourceLimits | None = None
    ) -> ProgramOutcome:
        """Run a program and wait for its end.

        Args:
            source: Python, run as `__main__`.
            stdin: what it reads from its standard input.
            files: name -> text of files in its folder, which is the current one.
            limits: of this program alone.

        Raises:
            DataError: a file's name leads out of the folder.
            Failure: the sandbox itself is broken: a process cannot be started.
        """
        files = dict(files or {})
        for name in files:
            if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
                raise DataError(f"a program's file is called {name!r}", "use a name within its folder")
        message = {"source": source, "stdin": stdin, "files": files, "limits": asdict(limits or self.limits)}
        return self._run_parts([message])[0]

    def check_program(self, program: str, tests: str, helpers: str = "") -> ProgramOutcome:
        """Run a program and its tests.

        They run in one process, as in ordinary Python: what fails there has failed. What passes there has passed,
        unless the program reaches for what could touch its tests (`program_analysis.py`); then the tests run once more
        in a process of their own, which calls what the program has defined and gets data back (`test_process.py`).
        Where only that fails, it cannot be told whether the program is right: its status is `unjudged`.

        Args:
            program: Python, of which nothing is trusted.
            tests: Python that raises where the program is wrong; names that it does not define are the program's.
            helpers: definitions that the tests may use besides, as trusted as they are: the prompt of a task.

        Returns:
            The outcome; `passed` tells the result, `is_judged` whether there is one.

        Raises:
            Failure: as `run`.
        """
        shared = {"stdin": "", "files": {}, "limits": asdict(self.limits)}
        joint = {"source": program, "part": "joint", "tests": tests, "helpers": helpers, **shared}
        done = self._run_parts([{**joint, "prefer_program": False}])[0]
        cpu, reaches = done.cpu_seconds, done.reaches
        if done.finished and done.test_report == "shadowed":
            done = self._run_parts([{**joint, "prefer_program": True}])[0]
            cpu += done.cpu_seconds
        if done.finished and done.test_report == "touched":
            reaches = [*reaches, "a change of what its tests use"]
        done = replace(done, cpu_seconds=cpu, reaches=reaches)
        if self.protections.mode == CHROOT and (module := _find_absent_module(done.stderr)):
            return replace(done, status="unjudged", finished=False, reaches=[f"{module}, a module that chroot lacks"])
        if not (done.is_ok and done.finished):
            alone = self._run_parts([{**joint, "part": "ordinary"}])[0] if done.shares else done
            if not (alone.is_ok and alone.finished):
                return replace(done, finished=False)
            own = ["names that its tests or its prompt have, too"]
            return replace(done, status="unjudged", finished=False, cpu_seconds=cpu + alone.cpu_seconds, reaches=own)
        if not reaches:
            return replace(done, passed=True)
        parts = [
            {"source": program, "part": "program", **shared},
            {"source": tests, "part": "tests", "helpers": helpers, **shared},
        ]
        apart = merge_outcomes(*self._run_parts(parts))
        apart = replace(apart, cpu_seconds=cpu + apart.cpu_seconds, reaches=reaches)
        return apart if apart.passed else replace(apart, status="unjudged", finished=False)

    def check_many(self, checks: Sequence[tuple[str, str, str]]) -> list[ProgramOutcome]:
        """Check (program, tests, helpers), as many at once as there are workers; outcomes in their order."""
        with ThreadPoolExecutor(self._idle_zygotes.maxsize) as pool:
            return list(pool.map(lambda one: self.check_program(*one), checks))

    def run_many(self, sources: Sequence[str], files: Sequence[Mapping[str, str]]) -> list[ProgramOutcome]:
        """Run programs, each with its files, as many at once as there are workers; outcomes in their order.

        Raises:
            DataError, Failure: as `run`.
        """
        if len(sources) < 2 or self._idle_zygotes.maxsize < 2:
            return [self.run(source, files=program_files) for source, program_files in zip(sources, files, strict=True)]
        with ThreadPoolExecutor(self._idle_zygotes.maxsize) as pool:
            return list(pool.map(lambda source, program_files: self.run(source, files=program_files), sources, files))

    def close(self) -> None:
        """End the processes; the one of a program under way in another thread ends with it."""
        self._is_closed = True
        while not self._idle_zygotes.empty():
            for zygote in self._idle_zygotes.get():
                if zygote is not None:
                    zygote.close()

    def _run_parts(self, parts: list[dict[str, Any]]) -> list[ProgramOutcome]:
        """Run the parts of one program at the same time."""
        answers = self._exchange_messages(parts)
        if None in answers:
            answers = self._exchange_messages(parts)  # once more: the kernel ends a zygote that has no memory
        for answer in answers:
            if answer is not None and "failed" in answer:
                raise Failure(f"the sandbox cannot run a program: {answer['failed']}", _RESOURCES_HINT)
        return [_KILLED if answer is None else ProgramOutcome(**answer) for answer in answers]

    def _exchange_messages(self, parts: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        if self._is_closed:
            raise RuntimeError("the sandbox is closed")
        zygotes = self._idle_zygotes.get()
        done = False
        try:
            for place in range(len(parts)):
                zygotes[place] = self._ensure_alive(zygotes[place])
            answers = _follow_zygotes(
                [zygote for zygote in zygotes[: len(parts)] if zygote], parts, self._counts_memory
            )
            done = None not in answers
        finally:  # also at Ctrl-C: its answer would be taken for the next one's
            if not done or self._is_closed:
                for zygote in zygotes:
                    if zygote is not None:
                        zygote.close()
                zygotes = [None, None]
            self._idle_zygotes.put(zygotes)
        return answers

    def _ensure_alive(self, zygote: _Zygote | None) -> _Zygote:
        if zygote is not None and zygote.owner_pid == os.getpid():
            return zygote
        zygote = _Zygote(self.protections.mode, self._readable)
        if not zygote.greeting or "refused" in zygote.greeting:
            zygote.close()
            raise Failure("the sandbox's process does not start", _RESOURCES_HINT)
        return zygote


_KILLED = ProgramOutcome("unjudged", False, "", "", 0, 137, 0.0, 0.0, 0.0, reaches=("its process was killed twice",))
"""Of a program that may have caused it: it ends itself at most, not the job that runs it."""


def _find_absent_module(stderr: str) -> str:
    """Return the module of the standard library that a program has ended for want of; empty: it has not."""
    last = stderr.strip().splitlines()[-1:]
    found = re.fullmatch(r"ModuleNotFoundError: No module named '([\w.]+)'.*", last[0]) if last else None
    return found[1] if found and found[1].partition(".")[0] in sys.stdlib_module_names else ""


def merge_outcomes(program: ProgramOutcome, tests: ProgramOutcome) -> ProgramOutcome:
    """Return what became of a program, from its own process and from that of its tests."""
    used = program.cpu_seconds + tests.cpu_seconds
    if program.status in ("timeout", "memory", "output", "files"):
        return replace(program, finished=False, cpu_seconds=used)
    if not tests.is_ok:
        merged = replace(program, status=tests.status, stderr=tests.stderr, code=tests.code)
        return replace(merged, finished=False, cpu_seconds=used)
    if not tests.finished:
        return replace(program, finished=False, cpu_seconds=used)
    return replace(program, status="ok", finished=True, passed=True, cpu_seconds=used)


def _follow_zygotes(
    zygotes: Sequence[_Zygote], parts: Sequence[dict[str, Any]], counted: bool
) -> list[dict[str, Any] | None]:
    """Let zygotes run a program, or a program and its tests, and return their answers; None: that one is gone."""
    pipes = [os.pipe() for _ in parts[1:] for _ in range(2)]
    wires = [[pipes[0][0], pipes[1][1]], [pipes[1][0], pipes[0][1]]] if pipes else [[]]
    for zygote, part, wire in zip(zygotes, parts, wires, strict=True):
        zygote.send_message(part, wire)
    for handle in (handle for pipe in pipes for handle in pipe):
        os.close(handle)
    answers: list[dict[str, Any] | None] = [None] * len(parts)
    waiting = {zygote.channel.fileno(): place for place, zygote in enumerate(zygotes)}
    watched = select.poll()
    for handle in waiting:
        watched.register(handle, select.POLLIN)
    patience = inf
    while waiting:
        events = watched.poll(_POLL_SECONDS * 1000 if counted or patience < inf else None)
        for handle, _ in events:
            watched.unregister(handle)
            place = waiting.pop(handle)
            answers[place] = receive_message(zygotes[place].channel)
            answer = answers[place]
            if answer is None or (place and (answer["finished"] or answer["status"] != "ok")):
                patience = 0.0
            elif place:  # the program has left, and is about to say why
                patience = time.monotonic() + _GRACE_SECONDS
        if waiting and patience < time.monotonic():  # the tests have ended: nobody asks the program any more
            for place in waiting.values():
                zygotes[place].send_message({END_KEY: "ok"})
            patience = inf
        for place in () if events else waiting.values():
            if zygotes[place].measure_memory() > parts[place]["limits"]["memory_mib"] * MIB:
                zygotes[place].send_message({END_KEY: "memory"})
    return answers


def probe_protections() -> Protections:
    """Return what this kernel offers this user, found out by trying."""
    zygote, found = _start_best_mode((), ISOLATION_MODES)
    zygote.close()
    return found


def unprotected_error(found: Protections) -> Failure:
    """Return the error for a machine where programs cannot be isolated."""
    reasons = "; ".join(f"{way}: {reason}" for way, reason in found.reasons.items())
    return Failure(
        f"programs of a model would not be isolated: no protection of {', '.join(found.missing_guards)} ({reasons})",
        "allow user namespaces (sysctl user.max_user_namespaces; docker run --security-opt seccomp=unconfined) or use "
        "Linux 5.13 or later with Landlock; sandbox.allow_weaker: true runs them anyway",
    )


def _start_best_mode(readable: Sequence[str], ways: Sequence[str]) -> tuple[_Zygote, Protections]:
    reasons: dict[str, str] = {}
    for way in ways:
        zygote = _Zygote(way, readable)
        greeting = zygote.greeting
        if greeting and "guards" in greeting:
            guards = dict(greeting["guards"])
            if way == NAMESPACES and can_list_children():
                guards["memory"] = f"counted every {_POLL_SECONDS * 1000:g} ms"
            return zygote, Protections(way, guards, reasons)
        zygote.close()
        reasons[way] = greeting["refused"] if greeting else "its process ended"
    raise Failure(f"the sandbox's process does not start: {reasons}", _RESOURCES_HINT)


_ANONYMOUS_DEVICE = b"00:01"
"""The device of memory that processes share without a file, in /proc/PID/maps: of mmap(MAP_SHARED|MAP_ANONYMOUS)."""


def can_list_children() -> bool:
    """Return whether this kernel tells the children of a process (CONFIG_PROC_CHILDREN)."""
    return os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def list_descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one; those that end meanwhile may be missing."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for task in tasks:
        for child in _read_proc_file(f"/proc/{pid}/task/{task}/children").split():
            yield int(child)
            yield from list_descendants(int(child))


def measure_used_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes that no file backs: what each holds, and all that they share, once.

    What is shared counts with the size of its mapping: after madvise(MADV_DONTNEED) the pages are still there, and
    resident in no process.
    """
    total, shared = 0, dict[bytes, int]()
    for pid in pids:
        kinds = [b"RssAnon:", b"VmSwap:"]
        if maps := _read_proc_file(f"/proc/{pid}/maps"):
            for inode, end in _shared_mappings(maps):
                shared[inode] = max(shared.get(inode, 0), end)
        else:  # it has ended, or this kernel shows it to nobody
            kinds.append(b"RssShmem:")
        lines = _read_proc_file(f"/proc/{pid}/status").splitlines()
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(tuple(kinds)))
    return total + sum(shared.values())


def count_sockets(pid: int) -> int:
    """Return the sockets in the network namespace of a process, those on their way through another one included."""
    words = _read_proc_file(f"/proc/{pid}/net/sockstat").split()  # sockets: used 3 TCP: ... (proc_pid_net(5))
    return int(words[2]) if words else 0


@functools.cache
def _read_socket_buffer() -> int:
    """Return the bytes that a socket holds at most, where no program may change that (socket(7), SO_SNDBUF)."""
    return int(_read_proc_file("/proc/sys/net/core/wmem_default") or 0)


def _shared_mappings(maps: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield inode and last byte of the mappings without a file (proc_pid_maps(5))."""
    for line in maps.splitlines():
        place, _, offset, device, inode, *_ = line.split(maxsplit=5)
        if device == _ANONYMOUS_DEVICE:
            first, _, last = place.partition(b"-")
            yield inode, int(offset, 16) + int(last, 16) - int(first, 16)


def _read_proc_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended
        return b""
