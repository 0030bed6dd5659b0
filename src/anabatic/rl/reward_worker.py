"""A user's Python file in its own process: what it raises or never returns costs one call, not the training."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from anabatic.core import log, relaunch
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean, format_size

_LOAD_SECONDS = 60.0
"""Seconds that a file may take to be loaded: it may import much."""
_MAX_SHOWN_BYTES = 1 << 16
"""Bytes of what a call prints that are shown; what is beyond is counted."""


class RewardCallError(Exception):
    """A call failed; says how."""


class UnjudgedAnswer(Exception):
    """Nobody can tell what an answer is worth; says why. It is left out: a reward of 0 would teach against it."""


class RewardWorker:
    """Functions of a Python file or module, called with a time limit. The process starts with the first call.

    Args:
        path: the file, which ends in `.py`, or the name of a module.
        timeout: seconds that a call may take.
    """

    def __init__(self, path: str, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._num_printed = 0

    def require_function(self, function: str) -> None:
        """Make sure that the file can be loaded and has the function.

        Raises:
            ConfigError: it is not there, it cannot be loaded, or it has no such function.
        """
        if self._path.endswith(".py") and not os.path.isfile(self._path):
            raise ConfigError(f"{self._path}: no such file", "name a Python file: FILE.py:FUNCTION")
        try:
            names = self._start_process()
        except RewardCallError as fault:
            raise ConfigError(f"{self._path} cannot be loaded: {fault}", "fix the file") from fault
        if function not in names:
            near = did_you_mean(function, names)
            raise ConfigError(f"{self._path} has no function {function}.{near}", "write one: def name(text, row)")

    def call_function(self, function: str, *arguments: Any) -> Any:
        """Return what the function returns: a number, a text or None.

        Raises:
            RewardCallError: it raised, took too long, or its process ended.
        """
        if self._process is None:
            self._start_process()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([function, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            self.close()
            raise RewardCallError(f"its process has ended: {error}") from error
        return self._read_answer(self._timeout)

    def _start_process(self) -> list[str]:
        self.close()
        with relaunch.block_group_signals():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "anabatic.rl.reward_worker_main", self._path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=relaunch.build_child_environment(),
                start_new_session=True,
            )
        names: list[str] = self._read_answer(_LOAD_SECONDS)
        return names

    def _read_answer(self, timeout: float) -> Any:
        answer = json.loads(self._read_line(timeout))
        if "error" in answer:
            raise RewardCallError(answer["error"])
        return answer["value"]

    def _read_line(self, timeout: float) -> bytes:
        """Return the next line of answers; show what is printed meanwhile."""
        assert self._process is not None and self._process.stdout is not None and self._process.stderr is not None
        out, printed, end = self._process.stdout, self._process.stderr, time.monotonic() + timeout
        self._num_printed = 0
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            selector.register(printed, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = end - time.monotonic()
                ready = [key.fileobj for key, _ in selector.select(max(0.0, left))]
                if printed in ready and not self._show_printed(os.read(printed.fileno(), 1 << 16)):
                    selector.unregister(printed)
                if out in ready:
                    self._append_output(os.read(out.fileno(), 1 << 16))
                elif left <= 0:
                    self.close()
                    raise RewardCallError(f"no answer within {timeout:g} s")
        if self._num_printed > _MAX_SHOWN_BYTES:
            log.warn(
                f"{os.path.basename(self._path)} printed {format_size(self._num_printed)} in one call; "
                f"{format_size(_MAX_SHOWN_BYTES)} are shown"
            )
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _append_output(self, read: bytes) -> None:
        if not read:
            assert self._process is not None
            with suppress(subprocess.TimeoutExpired):  # it closes its files before it ends
                self._process.wait(1)
            raise RewardCallError(f"its process ended with code {self.close()}")
        self._buffer += read

    def _show_printed(self, read: bytes) -> bytes:
        """Pass on what was printed, as long as it is no flood."""
        sys.stderr.write(read[: max(0, _MAX_SHOWN_BYTES - self._num_printed)].decode("utf-8", "replace"))
        self._num_printed += len(read)
        return read

    def close(self) -> int | None:
        """End the process with all that it has started in its group; return its exit code."""
        process, self._process, self._buffer = self._process, None, b""
        if process is None:
            return None
        with suppress(ProcessLookupError):  # nobody of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            if stream is process.stderr:  # what it said last
                os.set_blocking(stream.fileno(), False)
                with suppress(BlockingIOError):
                    self._show_printed(os.read(stream.fileno(), _MAX_SHOWN_BYTES))
            with suppress(BrokenPipeError):  # a call that it has not read
                stream.close()
        return code

    def __enter__(self) -> RewardWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
