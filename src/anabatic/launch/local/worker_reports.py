"""Reports of workers to their launcher, one folder per start: `rank-N.error`, `.code`, `.beat`, `.stack`, `.native`,
`failed.json`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.core import json_reader, relaunch
from anabatic.core.errors import TRACEBACK_HINT
from anabatic.core.formatting import parse_whole
from anabatic.core.paths import RunFolder
from anabatic.core.stop_signals import STOP_SIGNALS

LOST_FILE = "lost"
"""File with the reason why an agent has lost the other machines."""
REFUSED_FILE = "refused"
"""File with the differences between the recipes of the machines."""
REPLACED_FILE = "replaced"
"""File with the address of the agent that has replaced this one."""
UNUSED_FILE = "unused"
"""Written by the agent of a spare when the job has ended without it."""
MACHINE_FILE = "machine.json"
"""File with the arguments of `MachineRendezvous` for the agent."""
_RANKS_FILE, _MAX_RANKS = "ranks.json", 1 << 20
_MAX_SUMMARY_CHARS = 240
"""Most characters of a message in a summary: messages of CANN run over pages."""
_MAX_FOLLOW_UP_CHARS = 100
"""Most characters of a message that only followed another failure."""
_UNEXPECTED_PREFIX = "error: unexpected "
_LOG_TAIL_BYTES = 8192
_STOP_CODES = (relaunch.EXIT_PREEMPTED, relaunch.EXIT_INTERRUPTED)


def create_attempt_folder(root: Path, ranks: list[int]) -> Path:
    """Create the folder for the next start of the workers with these global ranks."""
    folder = root / f"try-{len(list_attempt_folders(root))}"
    folder.mkdir()
    (folder / _RANKS_FILE).write_text(json.dumps(ranks), encoding="utf-8")
    return folder


def list_attempt_folders(root: Path) -> list[Path]:
    """Return the folders of all starts, oldest first."""
    return sorted(root.glob("try-*"), key=lambda path: int(path.name.partition("-")[2]))


def read_restart_reason(folder: Path) -> str:
    """Return why a worker requested a restart; empty if none did."""
    path = folder / relaunch.RESTART_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@dataclass
class WorkerReport:
    """Messages and exit codes of the workers of one start.

    Attributes:
        ranks: global ranks on this machine.
        messages: message -> the ranks that wrote it, in order of time.
        codes: rank -> exit code, of ranks that exited on their own.
        failed: rank -> exit code, of ranks that failed before the agent stopped the others.
    """

    ranks: list[int]
    messages: dict[str, list[int]] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)

    @property
    def silent_ranks(self) -> dict[int, int]:
        """Return rank -> exit code of the ranks that failed first and left no message."""
        reporting_ranks = {rank for ranks in self.messages.values() for rank in ranks}
        return {
            rank: code for rank, code in self.failed.items() if rank not in reporting_ranks and rank not in self.codes
        }

    def format_messages(self) -> list[str]:
        """Return each distinct message once, those of the ranks that failed first before the others.

        After an explained error, unexpected errors of other ranks are shortened to one line: lost connections.
        """
        ordered = sorted(self.messages.items(), key=lambda item: not set(item[1]) & set(self.failed))
        is_explained = bool(ordered) and not ordered[0][0].startswith(_UNEXPECTED_PREFIX)
        lines = [
            (_format_follow_up(text) if is_explained and text.startswith(_UNEXPECTED_PREFIX) else text, ranks)
            for text, ranks in ordered
        ]
        rank_count = len(self.ranks)
        return [f"{'' if len(ranks) == rank_count else format_ranks(ranks) + ' '}{text}" for text, ranks in lines]

    def summarize_failure(self) -> str:
        """Return one line: which ranks failed, and how."""
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
        """Return the hint about the first failure; empty if it only points to the traceback."""
        lines = [] if self.silent_ranks or not self.messages else self.format_messages()[0].splitlines()
        return next((line for line in reversed(lines) if line.startswith("hint: ") and TRACEBACK_HINT not in line), "")

    def stop_exit_code(self) -> int:
        """Return the exit code of ranks that were asked to stop, despite follow-up failures; 0 if they were not."""
        if any(not text.startswith(_UNEXPECTED_PREFIX) for text in self.messages):
            return 0
        if any(code < 0 and -code not in STOP_SIGNALS for code in self.silent_ranks.values()):
            return 0  # one was killed, and the agent has asked the others to stop
        if not is_stop_requested(self.codes.values()) and not (self.failed and is_stop_requested(self.failed.values())):
            return 0
        return next((code for code in self.codes.values() if code in _STOP_CODES), relaunch.EXIT_PREEMPTED)


def is_stop_requested(codes: Iterable[int]) -> bool:
    """Return whether these exit codes show that the workers were asked to stop.

    The first to exit may break a connection of another one. SIGTERM ends workers without a handler yet. When one was
    killed, torch's agent ends the others by SIGTERM, and theirs is no sign of a request.
    """
    exit_codes = list(codes)
    if any(code < 0 and -code not in STOP_SIGNALS for code in exit_codes):
        return False
    return any(code in _STOP_CODES for code in exit_codes) or set(exit_codes) == {-signal.SIGTERM}


def read_worker_report(folder: Path) -> WorkerReport:
    """Read the reports in the folder of one start."""
    ranks, failed = _read_json(folder / _RANKS_FILE), _read_json(folder / relaunch.FAILED_RANKS_FILE)
    report = WorkerReport(
        [rank for rank in ranks if type(rank) is int and 0 <= rank < _MAX_RANKS] if isinstance(ranks, list) else []
    )
    errors = {rank: path for rank in report.ranks if (path := folder / f"rank-{rank}.error").is_file()}
    for rank, path in sorted(errors.items(), key=lambda item: item[1].stat().st_mtime_ns):
        report.messages.setdefault(path.read_text(encoding="utf-8", errors="replace"), []).append(rank)
    for rank in report.ranks:
        code_path = folder / f"rank-{rank}.code"
        if code_path.is_file():
            with suppress(ValueError):  # a full disk: the rank is one without a code
                report.codes[rank] = int(code_path.read_text(encoding="utf-8"))
    codes = {parse_whole(rank): code for rank, code in failed.items()} if isinstance(failed, dict) else {}
    report.failed = _drop_agent_kills(
        {rank: code for rank, code in codes.items() if rank is not None and type(code) is int}
    )
    return report


def _read_json(path: Path) -> Any:
    """Return what a worker or its agent has written; None where nothing whole is there, as on a full disk."""
    try:
        return json_reader.read_json_file(path)
    except (OSError, ValueError):
        return None


def _drop_agent_kills(codes: dict[int, int]) -> dict[int, int]:
    """Drop workers that the agent stopped after another one failed: it lists them, too, with its SIGTERM."""
    own_failures = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    return own_failures or codes


def _format_follow_up(text: str) -> str:
    line = text.splitlines()[0].removeprefix(_UNEXPECTED_PREFIX)
    return f"followed: {line if len(line) <= _MAX_FOLLOW_UP_CHARS else line[:_MAX_FOLLOW_UP_CHARS] + '…'}"


def format_ranks(ranks: list[int]) -> str:
    """Format ranks as `[rank 1, 3]`."""
    return f"[rank {_join_ranks(ranks)}]"


def describe_exit_codes(codes: dict[int, int]) -> str:
    """Format exit codes as `killed by SIGKILL`, `exit code 5`, each once."""
    names = {member.value: member.name for member in signal.Signals}
    descriptions = {
        f"killed by {names.get(-code, -code)}" if code < 0 else f"exit code {code}" for code in codes.values()
    }
    return ", ".join(sorted(descriptions))


def read_last_log_lines(folder: Path, log: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a rank's log; empty if it was not written in this start."""
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


_MAX_TAIL_BYTES = 65536
"""Most bytes read from the end, where the reason for a crash is."""


def read_stderr_tail(folder: Path, rank: int) -> str:
    """Return the tail of the native standard error of a rank in one start; empty if there is none."""
    path = folder / relaunch.NATIVE_STDERR_FILE.format(rank)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def append_to_rank_logs(folder: Path, ranks: list[int], out: Path | None) -> None:
    """Append the native standard error to the ranks' logs in the run folder."""
    for rank in ranks if out is not None and out.is_dir() else ():
        if text := read_stderr_tail(folder, rank):
            with open(RunFolder(str(out)).log_path(rank), "a", encoding="utf-8") as log:
                log.write(text if text.endswith("\n") else f"{text}\n")


def explain_stderr(text: str) -> str:
    """Return one line from the knowledge of `anabatic explain`; empty if nothing matches."""
    if not text or os.environ.get(relaunch.EXPLAIN_VARIABLE) == "0":
        return ""
    from anabatic.core import language
    from anabatic.doctor import knowledge_base
    from anabatic.doctor.explain import diagnosis, rendering

    return rendering.format_hint(
        diagnosis.explain_text(text, knowledge_base.load_knowledge()), language.choose_language(None, os.environ)
    )


def explain_failure(folder: Path, report: WorkerReport) -> str:
    """Return the hint about the first message, for a rank that was killed before it could print one."""
    if report.silent_ranks or not report.messages:
        return ""
    return explain_stderr(
        "\n".join([report.format_messages()[0], *(read_stderr_tail(folder, rank) for rank in report.failed)])
    )
