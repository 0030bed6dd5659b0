"""`anabatic explain`: which error came first among all ranks, and what it means.

A cause beats what other ranks suffer from it (HCCL timeouts, lost heartbeats, the launcher's summary), and both beat
general wrappers (`ERR00100`, `EZ9999`); among equals the earliest time wins, then the order of reading.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from anabatic.core.errors import ConfigError, DataError
from anabatic.doctor import explain_scan, knowledge, logs
from anabatic.doctor.explain_match import Matcher
from anabatic.doctor.explain_scan import Scan, Sight
from anabatic.doctor.knowledge import Entry, Knowledge

CARRIED = 20
"""Lines below an exception that belong to it."""
_CARRIERS = frozenset(
    {"aclnn-call", "aclnn-inner", "EE1001", *(f"{knowledge.UNKNOWN}{name}" for name in ("RuntimeError",
     "DistBackendError", "OSError", "ImportError", "SystemError", "Exception"))}
)  # fmt: skip
"""Entries that say that something failed, seldom what."""
_CODE = re.compile(r"[eE](?:[a-zA-Z]\d{4}|\d{5}|[rR]{2}\d{5})|-?\d{4,6}|hccl:\d{1,2}|0x[0-9a-fA-F]{4,6}")


@dataclass
class Finding:
    """One entry over all files and ranks."""

    entry: Entry
    code: str
    first: Sight
    count: int
    ranks: list[int]
    seen: list[Sight] = field(default_factory=list)

    @property
    def role(self) -> str:
        """The heaviest role in which the entry was seen."""
        return self.first.role


@dataclass
class Report:
    """What was found, the first cause in front."""

    findings: list[Finding]
    silent: list[int]
    """Ranks whose log names no error while all others only suffer: there the cause is likely to be."""
    scan: Scan
    ordered: bool = True
    """The ranks' times could be compared."""
    asked: bool = False
    """Codes were asked for, not found in a log."""

    @property
    def first(self) -> Finding | None:
        """The first cause."""
        return self.findings[0] if self.findings else None


def explain(
    words: tuple[str, ...],
    known: Knowledge,
    progress: Callable[[int], None] | None = None,
    every_start: bool = False,
) -> Report:
    """Explain logs, or codes typed in their place.

    Args:
        words: files, folders, `-`, or codes such as `EI0006`; nothing: CANN's own log folder.
        known: the entries.
        progress: told the bytes of every block that was read.
        every_start: also what a run wrote before it was started again.

    Raises:
        ConfigError: a word is an option that there is not.
        DataError: a name leads nowhere, or nothing of what was named can be read.
    """
    for word in words:
        if word.startswith("-") and word != "-" and not _CODE.fullmatch(word):
            raise ConfigError(f'unknown option "{word}"', "see `anabatic explain --help`")
    codes = [w for w in words if (_CODE.fullmatch(w) or w in known.by_code) and not Path(w).exists()]
    if codes and len(codes) == len(words):
        return _codes(codes, known)
    if codes:
        raise DataError(f"{codes[0]} is a code, {next(w for w in words if w not in codes)} a log", "ask for one kind")
    found = logs.collect(words)
    result = explain_scan.scan(found.files, Matcher(known), every_start=every_start, progress=progress)
    result.notes = found.notes + result.notes
    return judge(result)


def explain_text(text: str, known: Knowledge) -> Report:
    """Explain a text that is already here, for example a traceback."""
    return judge(explain_scan.scan_text(text, Matcher(known)))


def judge(result: Scan) -> Report:
    """Order what was seen: the first cause first."""
    _demote(result.sights)
    by_entry: dict[str, list[Sight]] = {}
    for sight in result.sights:
        by_entry.setdefault(sight.entry.id, []).append(sight)
    findings = [_finding(sights) for sights in by_entry.values()]
    findings.sort(key=lambda finding: _weight(finding.first))
    causes = [finding for finding in findings if finding.role == "cause"]
    suffering = {rank for finding in findings for rank in finding.ranks}
    silent = sorted(result.ranks - suffering) if findings and not causes else []
    serious = [finding for finding in findings if finding.role != "notice"]
    return Report(findings, silent, result, _comparable(serious))


def _demote(sights: list[Sight]) -> None:
    """Make what only passes on an error general, where what it passes on stands on the same or the next lines."""
    solid: dict[tuple[str, int | None], list[int]] = {}
    for sight in sights:
        if sight.role in ("cause", "consequence") and sight.entry.confidence != "low" and not _carries(sight):
            solid.setdefault((sight.file, sight.rank), []).append(sight.order)
    for orders in solid.values():
        orders.sort()
    for sight in sights:
        orders = solid.get((sight.file, sight.rank), [])
        at = bisect_left(orders, sight.order)
        if at < len(orders) and orders[at] - sight.order <= CARRIED and _carries(sight):
            sight.role = "wrapper"


def _carries(sight: Sight) -> bool:
    return sight.entry.id in _CARRIERS or sight.code.startswith("hccl:")


def _finding(sights: list[Sight]) -> Finding:
    sights = sorted(sights, key=_weight)
    ranks = sorted({sight.rank for sight in sights if sight.rank is not None})
    return Finding(sights[0].entry, sights[0].code, sights[0], sum(sight.count for sight in sights), ranks, sights)


def _weight(sight: Sight) -> tuple[int, bool, datetime, int, bool]:
    """Sort key: a guess, as from the prefix of a code, after what is known, of one line its words before a number."""
    guess = sight.entry.confidence == "low"
    less = bool(sight.code) != (sight.role == "wrapper")
    return knowledge.ROLES.index(sight.role), guess, sight.time or datetime.max, sight.order, less


def _comparable(findings: list[Finding]) -> bool:
    sights = [sight for finding in findings for sight in finding.seen]
    return len({sight.file for sight in sights}) < 2 or all(sight.time for sight in sights)


def _codes(words: list[str], known: Knowledge) -> Report:
    result = Scan()
    for order, word in enumerate(words):
        code = str(int(word, 16)) if word.lower().startswith("0x") else word
        code = code.upper() if code[:1] in "eE" else code
        entry = known.of_code(code)
        if entry is None:
            raise DataError(f"no component of CANN counts its codes like {word}", "give the log in which it stands")
        result.sights.append(Sight(entry, code, "", None, 0, "", 0, None, entry.role, False, order))
    findings = [_finding([sight]) for sight in result.sights]
    return Report(findings, [], result, asked=True)
