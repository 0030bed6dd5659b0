"""What workers leave for their launcher, start by start: `rank-N.error`, `.code`, `.beat`, `.stack`, `failed.json`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from anabatic.core import relaunch
from anabatic.core.errors import TRACEBACK_HINT
from anabatic.core.stop_signals import STOP_SIGNALS

LOST_FILE = "lost"
"""File in which an agent says how it has lost the others."""
REFUSED_FILE = "refused"
"""File in which an agent says in what the recipes of the machines differ."""
REPLACED_FILE = "replaced"
"""File in which an agent says from which address another one has taken its place."""
MACHINE_FILE = "machine.json"
"""File that tells an agent its place among the machines, and what to compare with the others."""
RENDEZVOUS_FILE = "meeting.json"
"""File that tells an agent where machine 0 is to answer before it begins."""
_RANKS_FILE = "ranks.json"
_MAX_SUMMARY_CHARS = 240
"""Characters of a message in a line about it: CANN's run over pages."""
_MAX_FOLLOW_UP_CHARS = 100
"""Characters of one that only followed another."""
_UNEXPECTED_PREFIX = "error: unexpected "
_LOG_TAIL_BYTES = 8192
_STOP_CODES = (relaunch.EXIT_PREEMPTED, relaunch.EXIT_INTERRUPTED)


def create_attempt_folder(root: Path, ranks: list[int]) -> Path:
    """Make the folder for the next start of the workers with these global ranks."""
    folder = root / f"try-{len(list_attempt_folders(root))}"
    folder.mkdir()
    (folder / _RANKS_FILE).write_text(json.dumps(ranks), encoding="utf-8")
    return folder


def list_attempt_folders(root: Path) -> list[Path]:
    """The folders of all starts, oldest first."""
    return sorted(root.glob("try-*"), key=lambda path: int(path.name.partition("-")[2]))


def read_restart_reason(folder: Path) -> str:
    """Why one of the workers of a start wanted another one; empty when none did."""
    path = folder / relaunch.RESTART_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@dataclass
class WorkerReport:
    """What the workers of one start have left.

    Attributes:
        ranks: global ranks on this machine.
        messages: message -> the ranks that gave it, in the order in which they came.
        codes: rank -> exit code, of those that ended by themselves.
        failed: rank -> exit code, of those that failed before the agent stopped the others.
    """

    ranks: list[int]
    messages: dict[str, list[int]] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)

    @property
    def silent_ranks(self) -> dict[int, int]:
        """Rank -> exit code of those that failed first and left no message."""
        spoken = {rank for ranks in self.messages.values() for rank in ranks}
        return {rank: code for rank, code in self.failed.items() if rank not in spoken and rank not in self.codes}

    def format_messages(self) -> list[str]:
        """Every different message once, those of the ranks that failed first before the others.

        After an error of ours, one line is enough for what others did not expect: the connection that went with it.
        """
        order = sorted(self.messages.items(), key=lambda item: not set(item[1]) & set(self.failed))
        known = bool(order) and not order[0][0].startswith(_UNEXPECTED_PREFIX)
        told = [
            (_format_follow_up(text) if known and text.startswith(_UNEXPECTED_PREFIX) else text, ranks)
            for text, ranks in order
        ]
        everybody = len(self.ranks)
        return [f"{'' if len(ranks) == everybody else format_ranks(ranks) + ' '}{text}" for text, ranks in told]

    def summarize_failure(self) -> str:
        """One line: who failed, and how."""
        if self.silent_ranks:
            return (
                f"rank {_join_ranks(self.silent_ranks)} ended without a message "
                f"({describe_exit_codes(self.silent_ranks)})"
            )
        lines = self.format_messages()
        if not lines:
            return "a process on another machine failed"
        line = lines[0].splitlines()[0].replace("error: ", "", 1)
        if not line.startswith("[rank "):
            line = f"{format_ranks(self.ranks)} {line}"
        return line if len(line) <= _MAX_SUMMARY_CHARS else f"{line[:_MAX_SUMMARY_CHARS]}…"

    def failure_hint(self) -> str:
        """The hint about the first failure; empty without one that says more than where the traceback is."""
        lines = [] if self.silent_ranks or not self.messages else self.format_messages()[0].splitlines()
        return next((line for line in reversed(lines) if line.startswith("hint: ") and TRACEBACK_HINT not in line), "")

    def stop_exit_code(self) -> int:
        """Exit code of ranks that were asked to leave, whatever that did to the others; 0 when they were not."""
        if any(not text.startswith(_UNEXPECTED_PREFIX) for text in self.messages):
            return 0
        if any(code < 0 and -code not in STOP_SIGNALS for code in self.silent_ranks.values()):
            return 0  # one was killed, and the agent has asked the others to leave
        if not is_stop_requested(self.codes.values()) and not (self.failed and is_stop_requested(self.failed.values())):
            return 0
        return next((code for code in self.codes.values() if code in _STOP_CODES), relaunch.EXIT_PREEMPTED)


def is_stop_requested(codes: Iterable[int]) -> bool:
    """True when these exit codes of workers say that somebody told them to leave.

    The first to leave may take a connection from another one. SIGTERM ends those that do not listen yet.
    """
    found = list(codes)
    return any(code in _STOP_CODES for code in found) or set(found) == {-signal.SIGTERM}


def read_worker_report(folder: Path) -> WorkerReport:
    """Return what is there."""
    told = WorkerReport(json.loads((folder / _RANKS_FILE).read_text(encoding="utf-8")))
    errors = {rank: path for rank in told.ranks if (path := folder / f"rank-{rank}.error").is_file()}
    for rank, path in sorted(errors.items(), key=lambda item: item[1].stat().st_mtime_ns):
        told.messages.setdefault(path.read_text(encoding="utf-8"), []).append(rank)
    for rank in told.ranks:
        ended = folder / f"rank-{rank}.code"
        if ended.is_file():
            told.codes[rank] = int(ended.read_text(encoding="utf-8"))
    named = folder / relaunch.FAILED_RANKS_FILE
    if named.is_file():
        told.failed = _drop_agent_kills(
            {int(rank): code for rank, code in json.loads(named.read_text(encoding="utf-8")).items()}
        )
    return told


def _drop_agent_kills(codes: dict[int, int]) -> dict[int, int]:
    """Leave those out that the agent has ended because of the others: it lists them, too, by its SIGTERM."""
    own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    return own or codes


def _format_follow_up(text: str) -> str:
    line = text.splitlines()[0].removeprefix(_UNEXPECTED_PREFIX)
    return f"followed: {line if len(line) <= _MAX_FOLLOW_UP_CHARS else line[:_MAX_FOLLOW_UP_CHARS] + '…'}"


def format_ranks(ranks: list[int]) -> str:
    """`[rank 1, 3]`."""
    return f"[rank {_join_ranks(ranks)}]"


def describe_exit_codes(codes: dict[int, int]) -> str:
    """`killed by SIGKILL`, `exit code 5`, each once."""
    names = {number.value: number.name for number in signal.Signals}
    told = {f"killed by {names.get(-code, -code)}" if code < 0 else f"exit code {code}" for code in codes.values()}
    return ", ".join(sorted(told))


def read_last_log_lines(folder: Path, log: Path, count: int) -> list[str]:
    """The newest lines of a rank's log, of those that hold anything; none when it wrote none in this start."""
    try:
        if log.stat().st_mtime_ns < (folder / _RANKS_FILE).stat().st_mtime_ns:
            return []
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-count:]


def _join_ranks(ranks: object) -> str:
    return ", ".join(str(rank) for rank in ranks)  # type: ignore[attr-defined]
