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
MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class CommandOutput:
    """Output of a program."""

    code: int | None
    """Exit code, negative for a signal; None: it did not end in time."""
    text: str
    """Standard output and error together."""


class BackgroundResult(Generic[T]):
    """A value that its own thread computes; the process may end without it."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._value: list[T] = []
        self._error: list[Exception] = []
        self._compute = compute
        self._thread = threading.Thread(target=self._run_compute, daemon=True)
        self._thread.start()

    def _run_compute(self) -> None:
        try:
            self._value.append(self._compute())
        except Exception as error:
            self._error.append(error)

    def wait_result(self, deadline: float) -> T | None:
        """Return the value; None when it is not there at `deadline` (of `time.monotonic`), or the system refused it.

        Raises:
            Exception: what the computation raised, unless it was an OSError.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._error and not isinstance(self._error[0], OSError):
            raise self._error[0]
        return self._value[0] if self._value else None


class StartGate:
    """A pipe that a child reads to its end before it continues; it ends when the gate opens."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        self._lock = threading.Lock()

    def open_gate(self) -> None:
        """Let the child continue."""
        with self._lock:
            if self._write_fd >= 0:
                os.close(self._write_fd)
                self._write_fd = -1


def find_program(program: str, folders: Sequence[str]) -> str | None:
    """Return the path of a program on PATH or in `folders`."""
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(folders))


def run_program(
    words: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
) -> CommandOutput:
    """Run a program for at most `seconds`; it and its children are killed then.

    Its output goes to a file: a grandchild that keeps a pipe open would make us wait for it.
    """
    environment = {**(os.environ if variables is None else variables), "LC_ALL": "C"}
    with open(os.memfd_create("output"), "w+b") as file:
        try:
            process = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return CommandOutput(127, f"{words[0]}: {error}")
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a call that hangs in the driver cannot be killed
                process.wait(0.2)
        file.seek(0)
        return CommandOutput(code, file.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace"))
