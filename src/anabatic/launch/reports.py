"""What workers leave for their launcher, start by start: `rank-N.error`, `.code`, `.beat`, `.stack`, `failed.json`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from anabatic.core import child
from anabatic.core.errors import TRACEBACK

LOST_WHY = "lost"
"""File in which an agent says how it has lost the others."""
REFUSED = "refused"
"""File in which an agent says in what the recipes of the machines differ."""
REPLACED = "replaced"
"""File in which an agent says from which address another one has taken its place."""
MACHINE = "machine.json"
"""File that tells an agent its place among the machines, and what to compare with the others."""
MEETING = "meeting.json"
"""File that tells an agent where machine 0 is to answer before it begins."""
_RANKS = "ranks.json"
_LONGEST = 240
"""Characters of a message in a line about it: CANN's run over pages."""
_AFTER = 100
"""Characters of one that only followed another."""
_UNEXPECTED = "error: unexpected "
_TAIL = 8192
_LEAVES = (child.PREEMPTED, child.INTERRUPTED)


def begin(root: Path, ranks: list[int]) -> Path:
    """Make the folder for the next start of the workers with these global ranks."""
    folder = root / f"try-{len(tries(root))}"
    folder.mkdir()
    (folder / _RANKS).write_text(json.dumps(ranks), encoding="utf-8")
    return folder


def tries(root: Path) -> list[Path]:
    """The folders of all starts, oldest first."""
    return sorted(root.glob("try-*"), key=lambda path: int(path.name.partition("-")[2]))


def wished(folder: Path) -> str:
    """Why one of the workers of a start wanted another one; empty when none did."""
    path = folder / child.WISH
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@dataclass
class Told:
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
    def silent(self) -> dict[int, int]:
        """Rank -> exit code of those that failed first and left no message."""
        spoken = {rank for ranks in self.messages.values() for rank in ranks}
        return {rank: code for rank, code in self.failed.items() if rank not in spoken and rank not in self.codes}

    def lines(self) -> list[str]:
        """Every different message once, those of the ranks that failed first before the others.

        After an error of ours, one line is enough for what others did not expect: the connection that went with it.
        """
        order = sorted(self.messages.items(), key=lambda item: not set(item[1]) & set(self.failed))
        known = bool(order) and not order[0][0].startswith(_UNEXPECTED)
        told = [(_followed(text) if known and text.startswith(_UNEXPECTED) else text, ranks) for text, ranks in order]
        everybody = len(self.ranks)
        return [f"{'' if len(ranks) == everybody else who(ranks) + ' '}{text}" for text, ranks in told]

    def brief(self) -> str:
        """One line: who failed, and how."""
        if self.silent:
            return f"rank {_joined(self.silent)} ended without a message ({ending(self.silent)})"
        lines = self.lines()
        if not lines:
            return "a process on another machine failed"
        line = lines[0].splitlines()[0].replace("error: ", "", 1)
        if not line.startswith("[rank "):
            line = f"{who(self.ranks)} {line}"
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"

    def why(self) -> str:
        """The hint about the first failure; empty without one that says more than where the traceback is."""
        lines = [] if self.silent or not self.messages else self.lines()[0].splitlines()
        return next((line for line in reversed(lines) if line.startswith("hint: ") and TRACEBACK not in line), "")

    def leave(self) -> int:
        """Exit code of ranks that were told to leave, whatever that did to the others; 0 when they were not."""
        if any(not text.startswith(_UNEXPECTED) for text in self.messages):
            return 0
        if not is_leaving(self.codes.values()) and not (self.failed and is_leaving(self.failed.values())):
            return 0
        return next((code for code in self.codes.values() if code in _LEAVES), child.PREEMPTED)


def is_leaving(codes: Iterable[int]) -> bool:
    """True when these exit codes of workers say that somebody told them to leave.

    The first to leave may take a connection from another one. SIGTERM ends those that do not listen yet.
    """
    found = list(codes)
    return any(code in _LEAVES for code in found) or set(found) == {-signal.SIGTERM}


def read(folder: Path) -> Told:
    """Return what is there."""
    told = Told(json.loads((folder / _RANKS).read_text(encoding="utf-8")))
    errors = {rank: path for rank in told.ranks if (path := folder / f"rank-{rank}.error").is_file()}
    for rank, path in sorted(errors.items(), key=lambda item: item[1].stat().st_mtime_ns):
        told.messages.setdefault(path.read_text(encoding="utf-8"), []).append(rank)
    for rank in told.ranks:
        ended = folder / f"rank-{rank}.code"
        if ended.is_file():
            told.codes[rank] = int(ended.read_text(encoding="utf-8"))
    named = folder / child.FAILED
    if named.is_file():
        told.failed = _first({int(rank): code for rank, code in json.loads(named.read_text(encoding="utf-8")).items()})
    return told


def _first(codes: dict[int, int]) -> dict[int, int]:
    """Leave those out that the agent has ended because of the others: it lists them, too, by its SIGTERM."""
    own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    return own or codes


def _followed(text: str) -> str:
    line = text.splitlines()[0].removeprefix(_UNEXPECTED)
    return f"followed: {line if len(line) <= _AFTER else line[:_AFTER] + '…'}"


def who(ranks: list[int]) -> str:
    """`[rank 1, 3]`."""
    return f"[rank {_joined(ranks)}]"


def ending(codes: dict[int, int]) -> str:
    """`killed by SIGKILL`, `exit code 5`, each once."""
    names = {number.value: number.name for number in signal.Signals}
    told = {f"killed by {names.get(-code, -code)}" if code < 0 else f"exit code {code}" for code in codes.values()}
    return ", ".join(sorted(told))


def last_lines(folder: Path, log: Path, count: int) -> list[str]:
    """The newest lines of a rank's log, of those that hold anything; none when it wrote none in this start."""
    try:
        if log.stat().st_mtime_ns < (folder / _RANKS).stat().st_mtime_ns:
            return []
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-count:]


def _joined(ranks: object) -> str:
    return ", ".join(str(rank) for rank in ranks)  # type: ignore[attr-defined]
