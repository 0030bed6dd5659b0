"""Run programs that nobody has read: `Sandbox().run(source)`.

A keeper, a process of its own, holds a warm interpreter and forks it for every program. Programs have no network, no
files but a folder of their own that is gone afterwards and, read-only, Python's standard library; they end with
everything that they have started. `protections` says what this kernel can do for it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from anabatic.core import child
from anabatic.core.errors import DataError, Failure
from anabatic.sandbox import memory
from anabatic.sandbox.channel import receive, send
from anabatic.sandbox.follow import END
from anabatic.sandbox.limits import MIB, Limits, Outcome
from anabatic.sandbox.way import NAMESPACES, WAYS

NEEDED = ("network", "files", "processes")
"""Without one of these no program is run, unless `allow_weaker` is set."""
_SOURCES = str(Path(__file__).parents[2])
_START = (
    "import sys; sys.path[0] = sys.argv[1]; from anabatic.sandbox import keeper; del sys.path[0]; "
    "keeper.main(int(sys.argv[2]), sys.argv[3], sys.argv[4:])"
)
_HINT = "is the machine out of memory or processes?"
_LOOK = 0.05
"""Seconds between two looks at the memory of a program under way."""
_PATIENCE = 1.0
"""Seconds for a program to end when its tests have found it gone."""
_PASSED_ON = ("LD_LIBRARY_PATH",)
"""Some interpreters find their library by it."""


@dataclass(frozen=True)
class Protections:
    """What keeps programs in.

    Attributes:
        way: `namespaces`, `landlock`, or `limits`: processor time, memory, files, and nothing else.
        guards: `network`, `files`, `processes`, `calls` -> what guards it; what is missing is not guarded.
        reasons: better way -> why it cannot be had here.
    """

    way: str
    guards: dict[str, str]
    reasons: dict[str, str]

    @property
    def missing(self) -> list[str]:
        """What is needed and not guarded."""
        return [name for name in NEEDED if name not in self.guards]


class _Keeper:
    """The process, and this end of the channel to it."""

    def __init__(self, way: str, readable: Sequence[str]) -> None:
        own, other = socket.socketpair()
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "PYTHONHASHSEED": "0"}
        words = [sys.executable, "-s", "-S", "-B", "-c", _START, _SOURCES, str(other.fileno()), way, *readable]
        with other, child.shielded():
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[other.fileno()], cwd="/",
                env=environment, start_new_session=True,
            )  # fmt: skip
        self.channel = own
        self.owner = os.getpid()
        self.told = receive(own)
        self._own = {*memory.descendants(self.process.pid)}

    def say(self, message: dict[str, Any], handles: Sequence[int] = ()) -> None:
        """Send a message, and handles behind it; that the keeper is gone shows when its answer is read."""
        with contextlib.suppress(OSError):
            send(self.channel, message)
            if handles:
                socket.send_fds(self.channel, [b"."], handles)

    def used(self) -> int:
        """Return the bytes of memory that the program under way holds, with all that it has started."""
        return memory.used_bytes({*memory.descendants(self.process.pid)} - self._own)

    def close(self) -> None:
        """End it, with the program that it runs."""
        self.channel.close()
        if os.getpid() == self.owner:
            self.process.wait()


class Sandbox:
    """Runs programs, several at once if asked from several threads.

    Args:
        limits: what each program may use.
        allow_weaker: run programs even where one of `NEEDED` is not guarded.
        readable: files and folders that programs may read, beside the standard library.
        workers: programs at once.
        ways: how programs may be shut in; the first that works is taken.

    Raises:
        Failure: a needed protection cannot be had here.
    """

    def __init__(
        self, limits: Limits | None = None, *, allow_weaker: bool = False, readable: Sequence[str] = (),
        workers: int = 1, ways: Sequence[str] = WAYS,
    ) -> None:  # fmt: skip
        self.limits = limits or Limits()
        self._readable = tuple(readable)
        self._idle: queue.LifoQueue[list[_Keeper | None]] = queue.LifoQueue(workers)  # for programs, for tests
        self._closed = False
        first, self.protections = _best(self._readable, ways)
        if self.protections.missing and not allow_weaker:
            first.close()
            raise refusal(self.protections)
        # Only there several processes of a program may add up.
        self._counted = "memory" in self.protections.guards
        for _ in range(workers - 1):
            self._idle.put([None, None])
        self._idle.put([first, None])

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, source: str, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> Outcome:
        """Run a program and wait for its end.

        Args:
            source: Python, run as `__main__`.
            stdin: what it reads from its standard input.
            files: name -> text of files in its folder, which is the current one.
            limits: of this program alone.

        Raises:
            DataError: a file's name leads out of the folder.
            Failure: the sandbox itself is broken: a process cannot be started, the keeper was killed.
        """
        files = dict(files or {})
        for name in files:
            if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
                raise DataError(f"a program's file is called {name!r}", "use a name within its folder")
        message = {"source": source, "stdin": stdin, "files": files, "limits": asdict(limits or self.limits)}
        return self._outcomes([message])[0]

    def check(self, program: str, tests: str, helpers: str = "") -> Outcome:
        """Run a program, and its tests in a process of their own, which calls what the program has defined.

        `Outcome.passed` tells the result: the last line of the tests was reached. The program sees arguments, and
        answers with data (`values`); it sees neither the tests nor a way to say that it has passed.

        Args:
            program: Python, of which nothing is trusted.
            tests: Python that raises where the program is wrong; names that it does not define are the program's.
            helpers: definitions that the tests may use besides, as trusted as they are: the prompt of a task.

        Raises:
            Failure: as `run`.
        """
        shared = {"stdin": "", "files": {}, "limits": asdict(self.limits)}
        parts = [
            {"source": program, "part": "program", **shared},
            {"source": tests, "part": "tests", "helpers": helpers, **shared},
        ]
        return judged(*self._outcomes(parts))

    def check_many(self, checks: Sequence[tuple[str, str, str]]) -> list[Outcome]:
        """Check (program, tests, helpers), as many at once as there are workers; outcomes in their order."""
        with ThreadPoolExecutor(self._idle.maxsize) as pool:
            return list(pool.map(lambda one: self.check(*one), checks))

    def run_many(self, sources: Sequence[str], files: Sequence[Mapping[str, str]]) -> list[Outcome]:
        """Run programs, each with its files, as many at once as there are workers; outcomes in their order.

        Raises:
            DataError, Failure: as `run`.
        """
        if len(sources) < 2 or self._idle.maxsize < 2:
            return [self.run(source, files=own) for source, own in zip(sources, files, strict=True)]
        with ThreadPoolExecutor(self._idle.maxsize) as pool:
            return list(pool.map(lambda source, own: self.run(source, files=own), sources, files))

    def close(self) -> None:
        """End the processes; the one of a program under way in another thread ends with it."""
        self._closed = True
        while not self._idle.empty():
            for keeper in self._idle.get():
                if keeper is not None:
                    keeper.close()

    def _outcomes(self, parts: list[dict[str, Any]]) -> list[Outcome]:
        """Run the parts of one program at the same time."""
        answers = self._ask(parts)
        if None in answers:
            answers = self._ask(parts)  # once more: the kernel ends a keeper that has no memory
        for answer in answers:
            if answer is None or "failed" in answer:
                why = "its process was killed twice" if answer is None else answer["failed"]
                raise Failure(f"the sandbox cannot run a program: {why}", _HINT)
        return [Outcome(**answer) for answer in answers if answer is not None]

    def _ask(self, parts: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        if self._closed:
            raise RuntimeError("the sandbox is closed")
        keepers = self._idle.get()
        done = False
        try:
            for place in range(len(parts)):
                keepers[place] = self._alive(keepers[place])
            answers = _follow([keeper for keeper in keepers[: len(parts)] if keeper], parts, self._counted)
            done = None not in answers
        finally:  # also at Ctrl-C: its answer would be taken for the next one's
            if not done or self._closed:
                for keeper in keepers:
                    if keeper is not None:
                        keeper.close()
                keepers = [None, None]
            self._idle.put(keepers)
        return answers

    def _alive(self, keeper: _Keeper | None) -> _Keeper:
        if keeper is not None and keeper.owner == os.getpid():
            return keeper
        keeper = _Keeper(self.protections.way, self._readable)
        if not keeper.told or "refused" in keeper.told:
            keeper.close()
            raise Failure("the sandbox's process does not start", _HINT)
        return keeper


def judged(program: Outcome, tests: Outcome) -> Outcome:
    """Return what became of a program, from its own process and from that of its tests."""
    used = program.cpu_seconds + tests.cpu_seconds
    if program.status in ("timeout", "memory", "output"):
        return replace(program, finished=False, cpu_seconds=used)
    if not tests.ok:
        said = replace(program, status=tests.status, stderr=tests.stderr, code=tests.code)
        return replace(said, finished=False, cpu_seconds=used)
    if not tests.finished:
        return replace(program, finished=False, cpu_seconds=used)
    return replace(program, status="ok", finished=True, passed=True, cpu_seconds=used)


def _follow(keepers: Sequence[_Keeper], parts: Sequence[dict[str, Any]], counted: bool) -> list[dict[str, Any] | None]:
    """Let keepers run a program, or a program and its tests, and return their answers; None: that one is gone."""
    pipes = [os.pipe() for _ in parts[1:] for _ in range(2)]
    wires = [[pipes[0][0], pipes[1][1]], [pipes[1][0], pipes[0][1]]] if pipes else [[]]
    for keeper, part, own in zip(keepers, parts, wires, strict=True):
        keeper.say(part, own)
    for handle in (handle for pipe in pipes for handle in pipe):
        os.close(handle)
    answers: list[dict[str, Any] | None] = [None] * len(parts)
    waiting = {keeper.channel.fileno(): place for place, keeper in enumerate(keepers)}
    watched = select.poll()
    for handle in waiting:
        watched.register(handle, select.POLLIN)
    patience = inf
    while waiting:
        events = watched.poll(_LOOK * 1000 if counted or patience < inf else None)
        for handle, _ in events:
            watched.unregister(handle)
            place = waiting.pop(handle)
            answers[place] = receive(keepers[place].channel)
            answer = answers[place]
            if answer is None or (place and (answer["finished"] or answer["status"] != "ok")):
                patience = 0.0
            elif place:  # the program has left, and is about to say why
                patience = time.monotonic() + _PATIENCE
        if waiting and patience < time.monotonic():  # the tests have ended: nobody asks the program any more
            for place in waiting.values():
                keepers[place].say({END: "ok"})
            patience = inf
        for place in () if events else waiting.values():
            if keepers[place].used() > parts[place]["limits"]["memory_mib"] * MIB:
                keepers[place].say({END: "memory"})
    return answers


def protections() -> Protections:
    """Return what this kernel offers this user, found out by trying."""
    keeper, found = _best((), WAYS)
    keeper.close()
    return found


def refusal(found: Protections) -> Failure:
    """Return the error for a machine where programs cannot be shut in."""
    reasons = "; ".join(f"{way}: {why}" for way, why in found.reasons.items())
    return Failure(
        f"programs of a model would not be shut in: no protection of {', '.join(found.missing)} ({reasons})",
        "allow user namespaces (sysctl user.max_user_namespaces; docker run --security-opt seccomp=unconfined) or use "
        "Linux 5.13 or later with Landlock; sandbox.allow_weaker: true runs them all the same",
    )


def _best(readable: Sequence[str], ways: Sequence[str]) -> tuple[_Keeper, Protections]:
    reasons: dict[str, str] = {}
    for way in ways:
        keeper = _Keeper(way, readable)
        told = keeper.told
        if told and "guards" in told:
            guards = dict(told["guards"])
            if way == NAMESPACES and memory.can_count():
                guards["memory"] = f"counted every {_LOOK * 1000:g} ms"
            return keeper, Protections(way, guards, reasons)
        keeper.close()
        reasons[way] = told["refused"] if told else "its process ended"
    raise Failure(f"the sandbox's process does not start: {reasons}", _HINT)
