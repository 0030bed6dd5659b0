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
from anabatic.core.formatting import parse_whole
from anabatic.doctor import knowledge_base
from anabatic.doctor.explain import log_files, log_scan
from anabatic.doctor.explain.log_scan import LogScan, Sighting
from anabatic.doctor.explain.matcher import LogMatcher
from anabatic.doctor.knowledge_base import KnowledgeBase, KnowledgeEntry

MAX_CARRIED_LINES = 20
"""Lines below an exception that belong to it."""
_CARRIER_ENTRIES = frozenset(
    {
        "aclnn-call",
        "aclnn-inner",
        "EE1001",
        *(
            f"{knowledge_base.UNKNOWN_EXCEPTION_PREFIX}{name}"
            for name in ("RuntimeError", "DistBackendError", "OSError", "ImportError", "SystemError", "Exception")
        ),
    }
)
"""Entries that say that something failed, seldom what."""
_ERROR_CODE = re.compile(r"[eE](?:[a-zA-Z]\d{4}|\d{5}|[rR]{2}\d{5})|-?\d{4,6}|hccl:\d{1,2}|0x[0-9a-fA-F]{4,6}")


@dataclass
class LogFinding:
    """One entry over all files and ranks."""

    entry: KnowledgeEntry
    code: str
    first_sighting: Sighting
    count: int
    ranks: list[int]
    sightings: list[Sighting] = field(default_factory=list)

    @property
    def role(self) -> str:
        """The heaviest role in which the entry was seen."""
        return self.first_sighting.role


@dataclass
class LogReport:
    """Findings, the first cause in front."""

    findings: list[LogFinding]
    silent_ranks: list[int]
    """Ranks whose log names no error while all others only suffer: there the cause is likely to be."""
    scan: LogScan
    is_ordered_by_time: bool = True
    """The ranks' times could be compared."""
    is_code_lookup: bool = False
    """Codes were asked for, not found in a log."""

    @property
    def first_cause(self) -> LogFinding | None:
        """The first cause."""
        return self.findings[0] if self.findings else None


def explain_logs(
    words: tuple[str, ...],
    known: KnowledgeBase,
    progress: Callable[[int], None] | None = None,
    every_start: bool = False,
) -> LogReport:
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
        if word.startswith("-") and word != "-" and not _ERROR_CODE.fullmatch(word):
            raise ConfigError(f'unknown option "{word}"', "see `anabatic explain --help`")
    codes = [w for w in words if (_ERROR_CODE.fullmatch(w) or w in known.by_code) and not Path(w).exists()]
    if codes and len(codes) == len(words):
        return _look_up_codes(codes, known)
    if codes:
        raise DataError(f"{codes[0]} is a code, {next(w for w in words if w not in codes)} a log", "ask for one kind")
    found = log_files.collect_logs(words)
    result = log_scan.scan_logs(found.files, LogMatcher(known), every_start=every_start, progress=progress)
    result.notes = found.notes + result.notes
    return rank_findings(result)


def explain_text(text: str, known: KnowledgeBase) -> LogReport:
    """Explain a text that is already here, for example a traceback."""
    return rank_findings(log_scan.scan_text(text, LogMatcher(known)))


def rank_findings(result: LogScan) -> LogReport:
    """Order what was seen: the first cause first."""
    _demote_carriers(result.sightings)
    starts = _find_first_times(result.sightings)
    by_entry: dict[str, list[Sighting]] = {}
    for sighting in result.sightings:
        by_entry.setdefault(sighting.entry.id, []).append(sighting)
    findings = [_merge_sightings(sights, starts) for sights in by_entry.values()]
    findings.sort(key=lambda finding: _get_sort_key(finding.first_sighting, starts))
    causes = [finding for finding in findings if finding.role == "cause"]
    suffering = {rank for finding in findings for rank in finding.ranks}
    silent = sorted(result.ranks - suffering) if findings and not causes else []
    serious = [finding for finding in findings if finding.role != "notice"]
    return LogReport(findings, silent, result, _has_comparable_times(serious))


def _demote_carriers(sights: list[Sighting]) -> None:
    """Make what only passes on an error general, where what it passes on stands on the same or the next lines."""
    solid: dict[tuple[str, int | None], list[int]] = {}
    for sighting in sights:
        if (
            sighting.role in ("cause", "consequence")
            and sighting.entry.confidence != "low"
            and not _is_carrier(sighting)
        ):
            solid.setdefault((sighting.file, sighting.rank), []).append(sighting.order)
    for orders in solid.values():
        orders.sort()
    for sighting in sights:
        orders = solid.get((sighting.file, sighting.rank), [])
        at = bisect_left(orders, sighting.order)
        if at < len(orders) and orders[at] - sighting.order <= MAX_CARRIED_LINES and _is_carrier(sighting):
            sighting.role = "wrapper"


def _is_carrier(sighting: Sighting) -> bool:
    return sighting.entry.id in _CARRIER_ENTRIES or sighting.code.startswith("hccl:")


def _find_first_times(sights: list[Sighting]) -> dict[str, datetime]:
    """Return the first time of each file: what stands before it there is not later."""
    times: dict[str, datetime] = {}
    for sighting in sorted(sights, key=lambda sighting: sighting.order):
        if sighting.time is not None:
            times.setdefault(sighting.file, sighting.time)
    return times


def _merge_sightings(sights: list[Sighting], starts: dict[str, datetime]) -> LogFinding:
    sights = sorted(sights, key=lambda sighting: _get_sort_key(sighting, starts))
    ranks = sorted({sighting.rank for sighting in sights if sighting.rank is not None})
    return LogFinding(
        sights[0].entry, sights[0].code, sights[0], sum(sighting.count for sighting in sights), ranks, sights
    )


def _get_sort_key(sighting: Sighting, starts: dict[str, datetime]) -> tuple[int, bool, bool, datetime, int, bool]:
    """Sort key: a guess, as from the prefix of a code, after what is known; of general messages those with a number of
    the runtime or of HCCL first; of one line its words before a number."""
    guess = sighting.entry.confidence == "low"
    general = sighting.role == "wrapper"
    unnumbered = general and parse_whole(sighting.code.removeprefix("hccl:")) is None
    passes_on = (
        parse_whole(sighting.code) is not None and not general
    )  # a number of the runtime, of which the E lines below say more
    time = sighting.time or (None if passes_on else starts.get(sighting.file)) or datetime.max
    return (
        knowledge_base.ROLES.index(sighting.role),
        guess,
        unnumbered,
        time,
        sighting.order,
        bool(sighting.code) != general,
    )


def _has_comparable_times(findings: list[LogFinding]) -> bool:
    sights = [sighting for finding in findings for sighting in finding.sightings]
    return len({sighting.file for sighting in sights}) < 2 or all(sighting.time for sighting in sights)


def _look_up_codes(words: list[str], known: KnowledgeBase) -> LogReport:
    result = LogScan()
    for order, word in enumerate(words):
        code = str(int(word, 16)) if word.lower().startswith("0x") else word
        code = code.upper() if code[:1] in "eE" else code
        entry = known.find_by_code(code)
        if entry is None:
            raise DataError(f"no component of CANN has error codes like {word}", "give the log that contains it")
        result.sightings.append(Sighting(entry, code, "", None, 0, "", 0, None, entry.role, False, order))
    findings = [_merge_sightings([sighting], {}) for sighting in result.sightings]
    return LogReport(findings, [], result, is_code_lookup=True)
