"""See when no process of a job moves any more, learn where they stand, and end them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anabatic.core import heartbeat

_STACK_SECONDS = 3.0
"""Seconds that processes get to write their stacks."""
_PHASE_NAMES = {
    heartbeat.STEP_NOT_TRAINING: "before the first step",
    heartbeat.STEP_JOINING: "where the processes meet",
}
_FRAME_LINE = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')


@dataclass(frozen=True)
class HungProcess:
    """Where one process stands.

    Attributes:
        step: the last one it has finished.
        state: of the process as Linux names it, `T` is stopped; empty when it is gone.
        stack: of all its threads as faulthandler writes it; empty where it did not answer.
    """

    rank: int
    pid: int
    step: int
    state: str
    stack: str

    def describe_position(self) -> str:
        """One line about it."""
        place = "it did not tell where"
        if self.state in ("T", "t"):
            place = "the process is stopped (SIGSTOP)"
        elif not self.state:
            place = "the process is gone"
        elif found := find_innermost_frame(self.stack):
            place = f"in {found}"
        when = _PHASE_NAMES.get(self.step, f"after step {self.step}")
        return f"rank {self.rank} stands {when}: {place}"


class HangWatchdog:
    """Looks at the heartbeats of one start of the workers.

    Args:
        folder: of their reports.
        patience: seconds without any beat after which they count as hung; 0: never.
        meeting: seconds that they may wait for processes of other machines to join them, if that is longer.
        now: a clock in seconds.

    Attributes:
        limit_seconds: seconds that hold now.
    """

    def __init__(
        self, folder: Path, patience: float, meeting: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.patience, self.meeting, self.now = folder, patience, meeting, now
        self.limit_seconds = patience
        self._last_signatures: dict[str, tuple[int, int, int]] = {}
        self._last_progress = now()
        self._is_over = False

    def is_hung(self) -> bool:
        """True when none of the processes has moved for too long; those that have ended or are gone do not count.

        A process that trains moves when it beats; one that does not train yet, when it takes CPU time.
        """
        beats = {
            path.name: _get_progress_signature(path)
            for path in self.folder.glob("*.beat")
            if not _has_ended(path) and not _is_gone(path)
        }
        if beats != self._last_signatures or not beats:
            self._last_signatures, self._last_progress = beats, self.now()
        waits = all(step == heartbeat.STEP_JOINING for _, _, step in beats.values())
        self.limit_seconds = max(self.patience, self.meeting) if waits else self.patience
        return (
            bool(self.patience and beats)
            and not self._is_over
            and self.now() - self._last_progress > self.limit_seconds
        )

    def dump_stacks_and_kill(self) -> list[HungProcess]:
        """Ask every process for its stack, kill them all, and return where they stood: the least step first."""
        self._is_over = True
        found = [
            (path, beat)
            for path in self.folder.glob("*.beat")
            if not _has_ended(path) and (beat := heartbeat.read_heartbeat(path))
        ]
        for _, (pid, _) in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, heartbeat.DUMP_SIGNAL)
        deadline = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < deadline and not all(
            _read_stack(path) or _read_process_state(beat[0]) in "Tt" for path, beat in found
        ):
            time.sleep(0.05)
        time.sleep(0.1)  # the last lines of a stack
        stands = []
        for path, (pid, step) in found:
            stands.append(HungProcess(_parse_rank(path), pid, step, _read_process_state(pid), _read_stack(path)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return sorted(stands, key=lambda stand: (stand.step, stand.state not in ("T", "t", ""), stand.rank))


def find_innermost_frame(stack: str) -> str:
    """Return `FILE:LINE function` of the main thread's innermost frame; empty when there is none."""
    *_, main = stack.partition("Current thread") if "Current thread" in stack else ("", stack)
    for line in main.splitlines():
        if found := _FRAME_LINE.match(line):
            return f"{found['file']}:{found['line']} {found['function']}"
    return ""


def _get_progress_signature(path: Path) -> tuple[int, int, int]:
    """What changes while a process moves: the time of its beat, its CPU time before the first step, its step."""
    pid, step = heartbeat.read_heartbeat(path) or (0, heartbeat.STEP_NOT_TRAINING)
    return path.stat().st_mtime_ns, _cpu_seconds(pid) if step < 0 else 0, step


def _cpu_seconds(pid: int) -> int:
    """Whole seconds of CPU time that a process has taken (proc_pid_stat(5), fields 14 and 15); 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return (int(fields[11]) + int(fields[12])) // os.sysconf("SC_CLK_TCK")


def _parse_rank(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def _has_ended(beat: Path) -> bool:
    return beat.with_suffix(".code").exists()


def _is_gone(beat: Path) -> bool:
    """True when its process is not there any more: its agent knows, or is away itself."""
    found = heartbeat.read_heartbeat(beat)
    return found is not None and not _read_process_state(found[0])


def _read_stack(beat: Path) -> str:
    path = beat.with_suffix(".stack")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _read_process_state(pid: int) -> str:
    """The letter of `/proc/PID/stat` (proc_pid_stat(5)); empty for a process that is gone or not collected yet."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "" if letter in "ZX" else letter
