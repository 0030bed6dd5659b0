"""Reads logs block by block and keeps, per entry and rank, the first place, the number of times and the time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from anabatic.doctor.explain import npu_tables, surroundings
from anabatic.doctor.explain.log_files import LogFile, read_blocks
from anabatic.doctor.explain.matcher import EntryMatch, LogMatcher
from anabatic.doctor.knowledge_base import KnowledgeBase, KnowledgeEntry

CUT_TRACEBACK_CODE = "traceback-cut"
"""Code of the entry for a traceback without its last line."""
MAX_SIGHTINGS = 20_000
"""Different (entry, file, rank) that are kept; more of them are only counted."""
_ORDER_STRIDE = 10**12
"""More than a file has lines."""
_RUN_START = b" INFO run folder "
"""In the first line that a run writes to its rank-N.log, and each time that it is started again."""
_SHOWN_BYTES = 400
"""Bytes of a line that are kept."""
_MARK_BYTES = 12
"""Bytes by which the place is found again in a cleaned line."""
_TIME_SEARCH_LINES = 200
"""Lines before a line without a time that are searched for one."""
_TAIL_BYTES = 1 << 14
"""Bytes at the end of a block that are searched for the time of its end."""
_TIMESTAMP = re.compile(
    rb"(?<!\d)(20\d\d)-(\d\d)-(\d\d)[-T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{3})(?:\.?(\d{3}))?)?"  # plog, logging
    rb"|(?<![A-Za-z0-9])[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{6})"  # glog, which torch's C++ uses
)
_RANK_MARK = re.compile(rb"\[rank:? ?(\d{1,6})\]|\[default(\d{1,6})\]|rankid:(\d{1,6})\b", re.IGNORECASE)
_WARNING_LINE = re.compile(
    rb"\s*(?:\x1b\[[\d;]*m|\[rank\d+\]: ?|\([A-Za-z_][\w .=,:-]{0,80}\) ?){0,6}"
    rb"(?:\[W(?:\d{4} |\]| )|W\d{4} |\[?WARN(?:ING)?[\]: ]|20\d\d-\d\d-\d\d[ T][\d:.,]+ (?:- )?WARN)"
)
"""Start of a warning in glog, plogs and Python's logging."""
_FRAME_LINE = re.compile(rb'^[^"\n]*?  File "[^"\n]+", line \d+, in \S', re.MULTILINE)
_EXCEPTION_LINE = re.compile(
    rb"(?:(?:[^\n\]( ][^\n\]]{0,119})?\] *|\([^)\n]{0,80}\) *)*[A-Za-z_][\w.]*(?::|\s*$)"  # fits in one way at most
)
_FRAME_PREFIX = re.compile(rb'^([^"\n]*?)  File "')
_TERMINAL_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?)")


_SightingKey = tuple[str, str, "int | None", bool]
"""Entry, file, rank, whether it is a warning."""


@dataclass
class Sighting:
    """First position and count of one entry in one file and rank."""

    entry: KnowledgeEntry
    code: str
    file: str
    rank: int | None
    line: int
    text: str
    offset: int
    """Position in `text` of the recognized part."""
    time: datetime | None
    role: str
    """That of the entry; a note when the line is only a warning: connections that are tried again, and the like."""
    has_own_time: bool
    """The time stands on the line itself, not on one before it."""
    order: int
    """Position among all sights, in the order of reading."""
    count: int = 1
    reason: str = ""
    """Reason from a neighboring line, where the line itself names none."""


@dataclass
class LogScan:
    """All that was seen."""

    sightings: list[Sighting] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_earlier: int = 0
    """Hits from before the last start of a run, left out."""
    num_unkept: int = 0
    """Hits beyond `MAX_SIGHTINGS`."""


def scan_logs(
    logs: Iterable[LogFile],
    matcher: LogMatcher,
    *,
    every_start: bool = False,
    progress: Callable[[int], None] | None = None,
) -> LogScan:
    """Read every log once, in bounded memory.

    Args:
        logs: what to read, in this order.
        matcher: what to look for.
        every_start: keep what a run wrote before it was started again.
        progress: told the bytes of every block.

    Raises:
        DataError: as for `log_files.read_blocks`.
    """
    result = LogScan()
    kept: dict[_SightingKey, Sighting] = {}
    for log in logs:
        reader = _LogFileScanner(log, result, kept, every_start)
        before = len(result.notes)
        for block in read_blocks(log, result.notes):
            reader.scan_block(block, matcher)
            if progress is not None:
                progress(len(block))
        reader.finish_file(matcher)
        result.files.append(log.name)
        result.num_earlier += reader.num_earlier
        if log.rank is not None:
            result.ranks.add(log.rank)
        if not reader.num_bytes and len(result.notes) == before:
            result.notes.append(f"{log.name} is empty")
    result.sightings = sorted(kept.values(), key=lambda sighting: sighting.order)
    return result


def scan_text(text: str, matcher: LogMatcher) -> LogScan:
    """Read a text that is already here."""
    result = LogScan()
    kept: dict[_SightingKey, Sighting] = {}
    reader = _LogFileScanner(LogFile("", None), result, kept)
    reader.scan_block(text.encode("utf-8", "replace"), matcher)
    reader.finish_file(matcher)
    result.sightings = list(kept.values())
    return result


class _LogFileScanner:
    """The place in one file: line number, the last time seen, the rank."""

    def __init__(
        self, log: LogFile, result: LogScan, kept: dict[_SightingKey, Sighting], every_start: bool = True
    ) -> None:
        self.log, self.result, self.kept, self.every_start = log, result, kept, every_start
        self.num_earlier = 0
        self.num_bytes = 0
        self.num_lines = 0
        self.last_time: datetime | None = None
        self.year = _get_log_year(log)
        self.tail = b""
        """The end of what was read."""

    def scan_block(self, block: bytes, matcher: LogMatcher) -> None:
        """Read the next block of the file."""
        start = -1 if self.every_start else block.rfind(_RUN_START)
        self.num_bytes += len(block)
        self.result.num_bytes += len(block)
        if start >= 0:
            begin = block.rfind(b"\n", 0, start) + 1
            self._drop_earlier_start()
            self.num_earlier += sum(
                len(found.matches) * found.count for found in matcher.find_matches(block[:begin])[1]
            )
            self._advance_past(block[:begin])
            block = block[begin:]
        lines, known = matcher.find_matches(block)
        for found in known:
            for hit in found.matches:
                self._record_match(lines, found.index, hit, found.count, matcher.knowledge)
        for fault in npu_tables.find_table_faults(block, lines or None):
            if (entry := matcher.knowledge.by_code.get(fault.code)) is not None:
                hit = EntryMatch(entry, fault.code, len(fault.code), 0, fault.text)
                self._record_match(lines or block.split(b"\n"), fault.index, hit, fault.count, matcher.knowledge)
        self._advance_past(block)
        self.tail = (self.tail + block)[-_TAIL_BYTES:]

    def finish_file(self, matcher: LogMatcher) -> None:
        """Tell of a traceback that has no last line, where nothing else in the file says what happened."""
        at = _find_cut_traceback(self.tail)
        entry = matcher.knowledge.by_code.get(CUT_TRACEBACK_CODE)
        file_sightings = (sighting for sighting in self.kept.values() if sighting.file == self.log.name)
        if at < 0 or entry is None or any(sighting.role in ("cause", "consequence") for sighting in file_sightings):
            return
        self.num_lines -= self.tail.count(b"\n", at)
        self._record_match(
            self.tail[at:].split(b"\n"),
            0,
            EntryMatch(entry, CUT_TRACEBACK_CODE, len(CUT_TRACEBACK_CODE), 0),
            1,
            matcher.knowledge,
        )

    def _advance_past(self, block: bytes) -> None:
        self.num_lines += block.count(b"\n")
        self.last_time = self._find_time_before(block[-_TAIL_BYTES:].split(b"\n")) or self.last_time

    def _drop_earlier_start(self) -> None:
        """The run was started again: what stopped it before was fixed, or is said again."""
        for key in [key for key in self.kept if key[1] == self.log.name]:
            self.num_earlier += self.kept.pop(key).count

    def _record_match(
        self, lines: list[bytes], index: int, hit: EntryMatch, count: int, knowledge: KnowledgeBase
    ) -> None:
        raw = lines[index]
        rank = self._find_rank(raw)
        warning = _WARNING_LINE.match(raw) is not None
        key = (hit.entry.id, self.log.name, rank, warning)
        if known := self.kept.get(key):
            known.count += count
            return
        if len(self.kept) >= MAX_SIGHTINGS:
            self.result.num_unkept += count
            return
        if rank is not None:
            self.result.ranks.add(rank)
        timestamp = _parse_time(_TIMESTAMP.search(raw), self.year)
        time = timestamp or self._find_time_before(lines[max(0, index - _TIME_SEARCH_LINES) : index]) or self.last_time
        excerpt = clean_line(_cut_around(raw, hit.offset))
        at = max(0, excerpt.find(clean_line(raw[hit.offset : hit.offset + _MARK_BYTES])))
        line = self.num_lines + index + 1
        order = len(self.result.files) * _ORDER_STRIDE + line
        entry = hit.entry
        if refinements := knowledge.refinements.get(entry.id):
            before = lines[max(0, index - surroundings.FRAME_LINES) : index]
            entry = surroundings.refine_entry(entry, refinements, before)
        role = "notice" if warning else entry.role
        reason = hit.reason or clean_line(surroundings.find_reason(lines, index)[:_SHOWN_BYTES])
        self.kept[key] = Sighting(
            entry,
            hit.code,
            self.log.name,
            rank,
            line,
            excerpt,
            at,
            time,
            role,
            timestamp is not None,
            order,
            count,
            reason,
        )

    def _find_time_before(self, lines: list[bytes]) -> datetime | None:
        found = (_parse_time(_TIMESTAMP.search(line), self.year) for line in reversed(lines))
        return next((time for time in found if time is not None), None)

    def _find_rank(self, raw: bytes) -> int | None:
        if self.log.rank is None and (found := _RANK_MARK.search(raw)):
            return int(next(group for group in found.groups() if group is not None))
        return self.log.rank


def _cut_around(line: bytes, at: int) -> bytes:
    """Return the part of a long line in which byte `at` lies: the last state of a progress bar, or what is near."""
    start = line.rfind(b"\r", 0, at) + 1
    if at - start > _SHOWN_BYTES // 2:
        return b"... " + line[at - _SHOWN_BYTES // 4 : at + _SHOWN_BYTES // 2]
    return line[start : start + _SHOWN_BYTES]


def clean_line(raw: bytes) -> str:
    """Return a line as it may go to a terminal: valid text without control characters."""
    text = _TERMINAL_ESCAPE.sub("", raw.decode("utf-8", "replace"))
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _get_log_year(log: LogFile) -> int:
    """glog writes no year: take the one in which the file was last written."""
    stamp = log.path.stat().st_mtime if log.path is not None and log.path.exists() else None
    return (datetime.fromtimestamp(stamp) if stamp is not None else datetime.now()).year


def _parse_time(found: re.Match[bytes] | None, year: int) -> datetime | None:
    if found is None:
        return None
    if found[1]:
        year, month, day, hour, minute, second = (int(found[index]) for index in range(1, 7))
        micro = int((found[7] or b"000") + (found[8] or b"000"))
    else:
        month, day, hour, minute, second = (int(found[index]) for index in range(9, 14))
        micro = int(found[14])
    try:
        return datetime(year, month, day, hour, minute, second, micro)
    except ValueError:  # 2026-13-45 is no time
        return None


def _find_cut_traceback(tail: bytes) -> int:
    """Return where the last frame of a traceback begins that does not come to its last line, or -1."""
    frames = list(_FRAME_LINE.finditer(tail))
    if not frames:
        return -1
    frame = frames[-1]
    prefix = _FRAME_PREFIX.match(frame[0])
    before = len(prefix[1]) if prefix else 0
    for line in tail[frame.start() :].split(b"\n")[1:]:
        if line[before : before + 1].strip():
            return -1 if _EXCEPTION_LINE.match(line, before) or _EXCEPTION_LINE.match(line) else frame.start()
    return frame.start()
