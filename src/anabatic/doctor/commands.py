"""Other programs: started with a time limit, never waited for longer, their output cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Output:
    """What a program said."""

    code: int | None
    """Exit code, negative for a signal; None: it did not end in time."""
    text: str
    """Standard output and error together."""


class Later(Generic[T]):
    """A value that a thread of its own computes; the process may end without it."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._value: list[T] = []
        self._compute = compute
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._value.append(self._compute())

    def get(self, deadline: float) -> T | None:
        """Return the value; None when it is not there at `deadline` (of `time.monotonic`)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._value[0] if self._value else None


def find(program: str, folders: Sequence[str]) -> str | None:
    """Return the path of a program on PATH or in `folders`."""
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(folders))


def run(words: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None) -> Output:
    """Run a program for at most `seconds`; it and its children are killed then.

    Its output goes to a file: a grandchild that keeps a pipe open would make us wait for it.
    """
    environment = {**(os.environ if variables is None else variables), "LC_ALL": "C"}
    with open(os.memfd_create("output"), "w+b") as file:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return Output(127, f"{words[0]}: {error}")
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a call that hangs in the driver cannot be killed
                process.wait(0.2)
        file.seek(0)
        return Output(code, file.read(MOST_BYTES).decode("utf-8", "replace"))
