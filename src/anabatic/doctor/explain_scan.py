"""Reads logs block by block and keeps, per entry and rank, the first place, the number of times and the time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from anabatic.doctor import explain_next
from anabatic.doctor.explain_match import Hit, Matcher
from anabatic.doctor.knowledge import Entry
from anabatic.doctor.logs import Log, blocks

CUT = "traceback-cut"
"""Code of the entry for a traceback without its last line."""
MOST_SIGHTS = 20_000
"""Different (entry, file, rank) that are kept; more of them are only counted."""
_LINES = 10**12
"""More than a file has lines."""
_START = b" INFO run folder "
"""In the first line that a run writes to its rank-N.log, and each time that it is started again."""
_SHOWN = 400
"""Bytes of a line that are kept."""
_MARK = 12
"""Bytes by which the place is found again in a cleaned line."""
_BEFORE = 200
"""Lines before a line without a time that are searched for one."""
_TAIL = 1 << 14
"""Bytes at the end of a block that are searched for the time of its end."""
_TIME = re.compile(
    rb"(?<!\d)(20\d\d)-(\d\d)-(\d\d)[-T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{3})(?:\.?(\d{3}))?)?"  # plog, logging
    rb"|(?<![A-Za-z0-9])[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{6})"  # glog, which torch's C++ uses
)
_RANK = re.compile(rb"\[rank:? ?(\d{1,6})\]|\[default(\d{1,6})\]|rankid:(\d{1,6})\b", re.IGNORECASE)
_WARNING = re.compile(
    rb"\s*(?:\[rank\d+\]: ?)?"
    rb"(?:\[W(?:\d{4} |\]| )|W\d{4} |\[?WARN(?:ING)?[\]: ]|20\d\d-\d\d-\d\d[ T][\d:.,]+ (?:- )?WARN)"
)
"""How glog, plogs and Python's logging begin a warning."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*\x07?)")


_Key = tuple[str, str, "int | None", bool]
"""Entry, file, rank, whether it is a warning."""


@dataclass
class Sight:
    """Where one entry was seen first in one file and rank, and how often there."""

    entry: Entry
    code: str
    file: str
    rank: int | None
    line: int
    text: str
    at: int
    """Where in `text` that stands which was recognised."""
    time: datetime | None
    role: str
    """That of the entry; a note when the line is only a warning: connections that are tried again, and the like."""
    own_time: bool
    """The time stands on the line itself, not on one before it."""
    order: int
    """Position among all sights, in the order of reading."""
    count: int = 1


@dataclass
class Scan:
    """All that was seen."""

    sights: list[Sight] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0
    earlier: int = 0
    """Hits from before the last start of a run, left out."""
    unkept: int = 0
    """Hits beyond `MOST_SIGHTS`."""


def scan(
    logs: Iterable[Log],
    matcher: Matcher,
    *,
    every_start: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Scan:
    """Read every log once, in bounded memory.

    Args:
        logs: what to read, in this order.
        matcher: what to look for.
        every_start: keep what a run wrote before it was started again.
        progress: told the bytes of every block.

    Raises:
        DataError: as for `logs.blocks`.
    """
    result = Scan()
    kept: dict[_Key, Sight] = {}
    for log in logs:
        reader = _File(log, result, kept, every_start)
        before = len(result.notes)
        for block in blocks(log, result.notes):
            reader.block(block, matcher)
            if progress is not None:
                progress(len(block))
        reader.finish(matcher)
        result.files.append(log.name)
        result.earlier += reader.earlier
        if log.rank is not None:
            result.ranks.add(log.rank)
        if not reader.num_bytes and len(result.notes) == before:
            result.notes.append(f"{log.name} is empty")
    result.sights = sorted(kept.values(), key=lambda sight: sight.order)
    return result


def scan_text(text: str, matcher: Matcher) -> Scan:
    """Read a text that is already here."""
    result = Scan()
    kept: dict[_Key, Sight] = {}
    reader = _File(Log("", None), result, kept)
    reader.block(text.encode("utf-8", "replace"), matcher)
    reader.finish(matcher)
    result.sights = list(kept.values())
    return result


class _File:
    """The place in one file: line number, the last time seen, the rank."""

    def __init__(self, log: Log, result: Scan, kept: dict[_Key, Sight], every_start: bool = True) -> None:
        self.log, self.result, self.kept, self.every_start = log, result, kept, every_start
        self.earlier = 0
        self.num_bytes = 0
        self.lines = 0
        self.last_time: datetime | None = None
        self.year = _year(log)
        self.tail = b""
        """The end of what was read."""

    def block(self, block: bytes, matcher: Matcher) -> None:
        """Read the next block of the file."""
        start = -1 if self.every_start else block.rfind(_START)
        self.num_bytes += len(block)
        self.result.num_bytes += len(block)
        if start >= 0:
            begin = block.rfind(b"\n", 0, start) + 1
            self._forget()
            self.earlier += sum(len(found.hits) * found.count for found in matcher.hits(block[:begin])[1])
            self._end(block[:begin])
            block = block[begin:]
        lines, known = matcher.hits(block)
        for found in known:
            for hit in found.hits:
                self._hit(lines, found.index, hit, found.count)
        self._end(block)
        self.tail = (self.tail + block)[-_TAIL:]

    def finish(self, matcher: Matcher) -> None:
        """Tell of a traceback that has no last line, where nothing else in the file says what happened."""
        at = explain_next.cut_at(self.tail)
        entry = matcher.knowledge.by_code.get(CUT)
        own = (sight for sight in self.kept.values() if sight.file == self.log.name)
        if at < 0 or entry is None or any(sight.role in ("cause", "consequence") for sight in own):
            return
        self.lines -= self.tail.count(b"\n", at)
        self._hit(self.tail[at:].split(b"\n"), 0, Hit(entry, CUT, len(CUT), 0), 1)

    def _end(self, block: bytes) -> None:
        self.lines += block.count(b"\n")
        self.last_time = self._time_before(block[-_TAIL:].split(b"\n")) or self.last_time

    def _forget(self) -> None:
        """The run was started again: what stopped it before was mended, or is said again."""
        for key in [key for key in self.kept if key[1] == self.log.name]:
            self.earlier += self.kept.pop(key).count

    def _hit(self, lines: list[bytes], index: int, hit: Hit, count: int) -> None:
        raw = lines[index]
        rank = self._rank(raw)
        warning = _WARNING.match(raw) is not None
        key = (hit.entry.id, self.log.name, rank, warning)
        if known := self.kept.get(key):
            known.count += count
            return
        if len(self.kept) >= MOST_SIGHTS:
            self.result.unkept += count
            return
        if rank is not None:
            self.result.ranks.add(rank)
        own = _time(_TIME.search(raw), self.year)
        time = own or self._time_before(lines[max(0, index - _BEFORE) : index]) or self.last_time
        shown = clean(_around(raw, hit.at))
        at = max(0, shown.find(clean(raw[hit.at : hit.at + _MARK])))
        line = self.lines + index + 1
        order = len(self.result.files) * _LINES + line
        role = "notice" if warning else hit.entry.role
        self.kept[key] = Sight(
            hit.entry, hit.code, self.log.name, rank, line, shown, at, time, role, own is not None, order, count
        )

    def _time_before(self, lines: list[bytes]) -> datetime | None:
        found = (_time(_TIME.search(line), self.year) for line in reversed(lines))
        return next((time for time in found if time is not None), None)

    def _rank(self, raw: bytes) -> int | None:
        if self.log.rank is None and (found := _RANK.search(raw)):
            return int(next(group for group in found.groups() if group is not None))
        return self.log.rank


def _around(line: bytes, at: int) -> bytes:
    """Return the part of a long line in which byte `at` lies: the last state of a progress bar, or what is near."""
    start = line.rfind(b"\r", 0, at) + 1
    if at - start > _SHOWN // 2:
        return b"... " + line[at - _SHOWN // 4 : at + _SHOWN // 2]
    return line[start : start + _SHOWN]


def clean(raw: bytes) -> str:
    """Return a line as it may go to a terminal: valid text without control characters."""
    text = _ESCAPE.sub("", raw.decode("utf-8", "replace"))
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _year(log: Log) -> int:
    """glog writes no year: take the one in which the file was last written."""
    stamp = log.path.stat().st_mtime if log.path is not None and log.path.exists() else None
    return (datetime.fromtimestamp(stamp) if stamp is not None else datetime.now()).year


def _time(found: re.Match[bytes] | None, year: int) -> datetime | None:
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
