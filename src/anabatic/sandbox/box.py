"""Run programs that nobody has read: `Sandbox().run(source)`.

A keeper, a process of its own, holds a warm interpreter and forks it for every program. Programs have no network, no
files but a folder of their own that is gone afterwards and, read-only, Python's standard library; they end with
everything that they have started. `protections` says what this kernel can do for it.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anabatic.core import child
from anabatic.core.errors import DataError, Failure
from anabatic.sandbox.keeper import receive, send
from anabatic.sandbox.limits import Limits, Outcome
from anabatic.sandbox.way import WAYS

NEEDED = ("network", "files", "processes")
"""Without one of these no program is run, unless `allow_weaker` is set."""
_SOURCES = str(Path(__file__).parents[2])
_START = (
    "import sys; sys.path[0] = sys.argv[1]; from anabatic.sandbox import keeper; del sys.path[0]; "
    "keeper.main(int(sys.argv[2]), sys.argv[3], sys.argv[4:])"
)
_HINT = "is the machine out of memory or processes?"
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

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send a message and wait for its answer; None: the keeper is gone."""
        try:
            send(self.channel, message)
        except OSError:
            return None
        return receive(self.channel)

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
        self._idle: queue.LifoQueue[_Keeper | None] = queue.LifoQueue(workers)
        self._closed = False
        first, self.protections = _best(self._readable, ways)
        if self.protections.missing and not allow_weaker:
            first.close()
            raise refusal(self.protections)
        for _ in range(workers - 1):
            self._idle.put(None)
        self._idle.put(first)

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
        answer = self._ask(message) or self._ask(message)  # once more: the kernel ends a keeper that has no memory
        if answer is None or "failed" in answer:
            why = "its process was killed twice" if answer is None else answer["failed"]
            raise Failure(f"the sandbox cannot run a program: {why}", _HINT)
        return Outcome(**answer)

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
            if keeper := self._idle.get():
                keeper.close()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if self._closed:
            raise RuntimeError("the sandbox is closed")
        keeper = self._idle.get()
        answer = None
        try:
            keeper = self._alive(keeper)
            answer = keeper.ask(message)
        finally:  # also at Ctrl-C: its answer would be taken for the next one's
            if answer is None or self._closed:
                if keeper is not None:
                    keeper.close()
                keeper = None
            self._idle.put(keeper)
        return answer

    def _alive(self, keeper: _Keeper | None) -> _Keeper:
        if keeper is not None and keeper.owner == os.getpid():
            return keeper
        keeper = _Keeper(self.protections.way, self._readable)
        if not keeper.told or "refused" in keeper.told:
            keeper.close()
            raise Failure("the sandbox's process does not start", _HINT)
        return keeper


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
            return keeper, Protections(way, told["guards"], reasons)
        keeper.close()
        reasons[way] = told["refused"] if told else "its process ended"
    raise Failure(f"the sandbox's process does not start: {reasons}", _HINT)
