"""Parse what `npu-smi` prints: detect the kind of text, strip what logs put before its lines, read the values.

A tolerant reader: cells are split at `|`, never at character positions (the tool pads and never cuts), layouts are
recognised by their header cells, chips by nothing; colours and what a log or a mail puts before the lines are dropped.
It raises on no text; a value that is not there is None, never 0.
Layouts: hicann/driver, src/custom/dev_prod/user/npucli/src/npu_info_print.c and npu_info_watch.c.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from anabatic.monitor.npu_smi import framed_tables, key_values, unframed_tables
from anabatic.monitor.npu_smi.framed_tables import InfoTable, VirtualTable
from anabatic.monitor.npu_smi.key_values import CardListing, KeyValueOutput
from anabatic.monitor.npu_smi.unframed_tables import ChipMapping, ErrorOutput, Topology, WatchTable

ParsedOutput = (
    InfoTable | VirtualTable | WatchTable | Topology | ChipMapping | CardListing | KeyValueOutput | ErrorOutput
)

_OUTPUT_READERS: tuple[Callable[[list[str]], ParsedOutput | None], ...] = (
    framed_tables.read_virtual,
    framed_tables.read_info,
    unframed_tables.read_watch,
    unframed_tables.read_topology,
    unframed_tables.read_mapping,
    key_values.read_listing,
    key_values.read_pairs,
)


def parse_output(text: str) -> ParsedOutput:
    """Return the values of any output of `npu-smi info ...`; text of no known form is an `ErrorOutput`."""
    lines = strip_line_prefixes(text)
    for read in _OUTPUT_READERS:
        found = read(lines)
        if found is not None:
            return found
    return unframed_tables.read_error(lines)


def parse_info_table(text: str) -> InfoTable:
    """Return the table of `npu-smi info`; other text has no devices, and its first line as `error`."""
    found = parse_output(text)
    if isinstance(found, InfoTable):
        return found
    return InfoTable(error=found.message if isinstance(found, ErrorOutput) else "not the table of `npu-smi info`")


_ESCAPE = r"(?:\x1b|\x9b(?=[0-9;?])|\^\[|\\x1b|\\u001b|\\033|\\e|\u241b)"
_COLOURS = re.compile(
    rf"{_ESCAPE}\[?[0-9;?]{{0,20}}[A-Za-z]|\x1b\][^\x07\x1b\n]{{0,200}}(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]|"
    r"\[[0-9]{1,3}(?:;[0-9]{1,3}){0,5}m|[\x0e\x0f\ufeff\u200b]"
)
"""Sequences of a terminal (ECMA-48), as they are, as programs write them out, and with the escape character lost."""

_LEVEL = r"(?!(?:INFO|DEBUG|WARN|WARNING|ERROR|NOTICE|CRITICAL|TRACE)\b)"
_KEY = r"[A-Z][A-Za-z0-9()/%_.-]{0,40}(?: [A-Za-z0-9()/%_.-]{1,40}){0,6}"
_PAIR = rf"(?<![\w(]){_LEVEL}{_KEY}[ \t]{{2,60}}:(?!\S)"
# What each layout has in every output, and no text beside it.
_MARKS = tuple(
    re.compile(mark)
    for mark in (
        r"\+[-=]{5}|\|[ \t]{1,9}(?:npu-smi[ \t]|NPU[ \t]{1,60}(?:(?:Name|Chip)[ \t]{0,60})?\|)",
        r"\|[ \t]{1,9}(?:NPU resource|Total number of vnpu)",
        r"NpuID\(",
        r"(?<![\w|])NPU ID[ \t]{1,60}(?:Slot|Chip) ID[ \t]",
        r"(?<![\w(])(?:NPU|Phy-ID)\d{1,4}[ \t]+(?:X|HCCS\w*|SIO|SYS|PHB|PIX|PXB|UB|NA)(?!\S)",
        r"(?<![\w(])(?:NPU ID|Slot ID|Total Count|Chip Count|Chip Phy-ID|Process id)[ \t]{0,60}:",
        _PAIR,
    )
)
_TABLE_START = re.compile(r"\s*(?:\||\+[-=]|NpuID\(|(?:NPU|Phy-ID)\d{1,4}(?:\s|$))")
_MAX_PREFIX_CHARS = 300
"""Characters of a prefix."""
_DATE = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}"
_TIME = rf"(?:{_DATE}[T_ -]{{1,2}})?\d{{1,2}}:\d\d(?::\d\d)?(?:[.,]\d{{1,9}}){{0,2}}(?:Z|[ ]?[+-]\d\d:?\d\d)?"
_PART = re.compile(
    rf"(?P<time>(?<![0-9A-Za-z]){_TIME}|(?<![0-9A-Za-z]){_DATE}|(?<![\w.])\d+\.\d+(?![\w.])|(?<!\w)\d{{9,}}(?!\w))|"
    r"(?P<blank>[ \t]+)|(?P<number>(?<![\w.-])\d+(?![\w.-]))|(?P<word>[\w.-]+)|(?P<mark>.)"
)
_ANY_TIME = rf"(?:{_TIME}|{_DATE}|\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class _LinePrefix:
    """Prefix of a line of a table, in parts."""

    parts: tuple[tuple[str, str], ...]

    def compile_pattern(self, write: Callable[[str, str], str]) -> re.Pattern[str]:
        """Return the pattern of this prefix on other lines."""
        return re.compile("".join(write(kind, text) for kind, text in self.parts))


def _split_prefix(text: str) -> _LinePrefix:
    found = ((str(match.lastgroup), match[0]) for match in _PART.finditer(text.rstrip()))
    return _LinePrefix(tuple(found))


def _similar_part_pattern(kind: str, text: str) -> str:
    """Return what another line of any process has in this place."""
    if kind in ("time", "number"):
        return f"({_ANY_TIME})" if kind == "time" else r"(\d+)"
    if kind == "blank":
        return r"[ \t]*"
    if kind == "word" and re.search(r"\d", text):
        return r"[\w.-]+"
    return re.escape(text)


def _is_line_counter(rows: list[tuple[str, ...]], place: int) -> bool:
    """Return True if a number counts the lines: it grows from each to the next."""
    numbers = [int(row[place]) for row in rows]
    return len(numbers) > 1 and all(before < after for before, after in zip(numbers, numbers[1:], strict=False))


def _source_patterns(prefix: _LinePrefix, lines: list[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of this prefix, and that of its like before the lines of other processes."""
    loose = prefix.compile_pattern(_similar_part_pattern)
    rows = [match.groups() for line in lines if (match := loose.match(line))]
    place = iter(range(loose.groups))

    def match_exactly(kind: str, text: str) -> str:
        if kind == "time":
            next(place)
            return _similar_part_pattern(kind, text)
        if kind == "number":
            return r"\d+" if _is_line_counter(rows, next(place)) else re.escape(text)
        return _similar_part_pattern(kind, text) if kind == "blank" else re.escape(text)

    return prefix.compile_pattern(match_exactly), loose


def _find_first_prefix(lines: list[str]) -> str | None:
    """Return what stands before the first line of a table; None where a table begins with its line."""
    if any(_TABLE_START.match(line) for line in lines):
        return None
    for mark in _MARKS:
        found = [(line, match) for line in lines if (match := mark.search(line))]
        before = [line[: match.start()] for line, match in found]
        if before:
            return before[0] if all(text.strip() for text in before) else None
    return None


def strip_line_prefixes(text: str) -> list[str]:
    """Return the lines of `text` without colours and without what is put before all lines of a table.

    A prefix goes only if it is common to the lines of the table: times may change in it, numbers may count, all else
    is the same. Lines that other processes wrote between them (the same form with another label) are left out.
    """
    lines = _COLOURS.sub("", text).splitlines()
    before = _find_first_prefix(lines)
    if before is None or len(before) > _MAX_PREFIX_CHARS:
        return lines
    exact, loose = _source_patterns(_split_prefix(before), lines)
    matches = [exact.match(line) for line in lines]
    places = [index for index, match in enumerate(matches) if match]
    between = [index for index in range(places[0], places[-1] + 1) if matches[index] or not loose.match(lines[index])]
    if 2 * len(places) < len([index for index in between if lines[index].strip()]):
        return lines
    return [
        line[match.end() :] if match else line
        for line, match in zip(lines, matches, strict=True)
        if match or not loose.match(line)
    ]
