"""Detect that no process of a job makes progress, collect their stacks, and kill them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anabatic.core import heartbeat, process_info

_STACK_SECONDS = 3.0
"""Seconds for the processes to write their stacks."""
_PHASE_NAMES = {
    heartbeat.STEP_NOT_TRAINING: "before the first step",
    heartbeat.STEP_JOINING: "where the processes meet",
}
_FRAME_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True)
class HungProcess:
    """State of one hung process.

    Attributes:
        step: last finished step.
        state: process state in Linux, `T` is stopped; empty when the process is gone.
        stack: stacks of all its threads in faulthandler's format; empty if it did not answer.
    """

    rank: int
    pid: int
    step: int
    state: str
    stack: str

    def describe_position(self) -> str:
        """Return one line about its position."""
        position = "it did not tell where"
        if self.state in ("T", "t"):
            position = "the process is stopped (SIGSTOP)"
        elif not self.state:
            position = "the process is gone"
        elif frame := find_innermost_frame(self.stack):
            position = f"in {frame}"
        phase = _PHASE_NAMES.get(self.step, f"after step {self.step}")
        return f"rank {self.rank} stands {phase}: {position}"


class HangWatchdog:
    """Watches the heartbeats of one start of the workers.

    Args:
        folder: their report folder.
        timeout: seconds without a heartbeat after which they count as hung; 0: never.
        join_timeout: seconds to wait for processes of other machines to join, if that is longer.
        clock: returns the time in seconds.

    Attributes:
        limit_seconds: the timeout that applies now.
    """

    def __init__(
        self, folder: Path, timeout: float, join_timeout: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.timeout, self.join_timeout, self.clock = folder, timeout, join_timeout, clock
        self.limit_seconds = timeout
        self._last_signatures: dict[str, tuple[int, int, int]] = {}
        self._last_progress = clock()
        self._is_over = False

    def is_hung(self) -> bool:
        """Return whether no process has made progress for too long; those that ended or are gone do not count.

        Progress is a new heartbeat; before training starts, also CPU time.
        """
        signatures = {
            path.name: _get_progress_signature(path)
            for path in self.folder.glob("*.beat")
            if not _has_ended(path) and not _is_gone(path)
        }
        if signatures != self._last_signatures or not signatures:
            self._last_signatures, self._last_progress = signatures, self.clock()
        is_joining = all(step == heartbeat.STEP_JOINING for _, _, step in signatures.values())
        self.limit_seconds = max(self.timeout, self.join_timeout) if is_joining else self.timeout
        return (
            bool(self.timeout and signatures)
            and not self._is_over
            and self.clock() - self._last_progress > self.limit_seconds
        )

    def dump_stacks_and_kill(self) -> list[HungProcess]:
        """Ask every process for its stack, kill them all, and return their states, lowest step first."""
        self._is_over = True
        running = [
            (path, beat)
            for path in self.folder.glob("*.beat")
            if not _has_ended(path) and (beat := heartbeat.read_heartbeat(path))
        ]
        for _, (pid, _) in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, heartbeat.DUMP_SIGNAL)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline and not all(
            _read_stack(path) or _read_process_state(beat[0]) in "Tt" for path, beat in running
        ):
            time.sleep(0.05)
        time.sleep(0.1)  # for the last lines of a stack
        hung_processes = []
        for path, (pid, step) in running:
            hung_processes.append(
                HungProcess(_parse_rank(path), pid, step, _read_process_state(pid), _read_stack(path))
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return sorted(
            hung_processes, key=lambda process: (process.step, process.state not in ("T", "t", ""), process.rank)
        )


def find_innermost_frame(stack: str) -> str:
    """Return `FILE:LINE function` of the main thread's innermost frame; empty if there is none."""
    *_, main_stack = stack.partition("Current thread") if "Current thread" in stack else ("", stack)
    for line in main_stack.splitlines():
        if match := _FRAME_LINE.match(line):
            return f"{match['file']}:{match['line']} {match['function']}"
    return ""


def _get_progress_signature(path: Path) -> tuple[int, int, int]:
    """Return values that change with progress: time of the heartbeat, CPU time before the first step, step."""
    pid, step = heartbeat.read_heartbeat(path) or (0, heartbeat.STEP_NOT_TRAINING)
    return path.stat().st_mtime_ns, _cpu_seconds(pid) if step < 0 else 0, step


def _cpu_seconds(pid: int) -> int:
    """Return the CPU time of a process in whole seconds; 0 when it is gone."""
    fields = process_info.read_process_fields(pid)
    return (int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK") if fields else 0


def _parse_rank(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _has_ended(beat_path: Path) -> bool:
    return beat_path.with_suffix(".code").exists()


def _is_gone(beat_path: Path) -> bool:
    """Return whether the process no longer exists: the agent handles that, or has ended itself."""
    beat = heartbeat.read_heartbeat(beat_path)
    return beat is not None and not _read_process_state(beat[0])


def _read_stack(beat_path: Path) -> str:
    stack_path = beat_path.with_suffix(".stack")
    return stack_path.read_text(encoding="utf-8", errors="replace") if stack_path.exists() else ""


def _read_process_state(pid: int) -> str:
    """Return the state letter of a process; empty for one that is gone or a zombie."""
    return next(iter(process_info.read_process_fields(pid)), "")
