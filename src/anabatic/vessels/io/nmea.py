"""Raw AIS sentences (`!AIVDM`), decoded by pyais; times come from tag blocks or stand before the sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from anabatic.core.errors import BROKEN_DATA_ERRORS, DataError, Failure
from anabatic.vessels.io.ais_tables import ColumnBatch, unreadable_file_error
from anabatic.vessels.io.bad_rows import BadRowPolicy

NMEA_SUFFIXES = (".nmea", ".nm4", ".aivdm", ".ais")
ROWS_PER_BATCH = 50_000
MAX_LINE_CHARS = 4096
"""Characters of a line that is looked at; a sentence has 82, the tag block before it some more."""
MAX_PENDING_MESSAGES = 1000
"""Messages whose other sentences are awaited: the oldest is given up then."""
_BLOCK_BYTES = 1 << 20
_SENTENCE_LINE = re.compile(r"^(?:\\[^\\]*?c:(\d{9,13})[^\\]*\\|(\d{9,13}(?:\.\d+)?)[ ,;\t])?.*?([!$]\w{5},.*)$")


def is_nmea_file(path: Path) -> bool:
    """True for a file name of raw sentences."""
    return path.suffix.lower() in NMEA_SUFFIXES


def read_nmea(path: Path, bad: BadRowPolicy) -> Iterator[ColumnBatch]:
    """Yield position reports (messages 1, 2, 3, 18, 19) with the ship type of messages 5, 19 and 24.

    A position whose ship type comes later in the file has none; the type of most positions decides.

    Raises:
        DataError: a sentence is broken or has no time.
        Failure: pyais is not installed.
    """
    try:
        from pyais import NMEAMessage
        from pyais.exceptions import AISBaseException
    except ImportError as error:
        raise Failure("pyais is not installed", "pip install 'anabatic[nmea]'") from error
    import pyarrow

    rows: list[tuple[Any, ...]] = []
    try:
        with open(path, "rb") as file:
            for row in _read_positions(
                path, _read_lines(file), NMEAMessage, (AISBaseException, *BROKEN_DATA_ERRORS), bad
            ):
                rows.append(row)
                if len(rows) == ROWS_PER_BATCH:
                    yield _make_batch(rows, pyarrow)
                    rows = []
    except OSError as error:
        raise unreadable_file_error(path, error) from error
    if rows:
        yield _make_batch(rows, pyarrow)


def _read_positions(
    path: Path, lines: Iterable[str], sentence: Any, broken: tuple[type[Exception], ...], bad: BadRowPolicy
) -> Iterator[tuple[Any, ...]]:
    """Yield (line, time, vessel, type, lat, lon, sog, cog, heading) of each position report."""
    types: dict[int, str] = {}
    parts: dict[tuple[Any, ...], list[Any]] = {}
    time: float | None = None
    for number, text in enumerate(lines, start=1):
        found = _SENTENCE_LINE.match(text.strip())
        if found is None:
            bad.counts["lines that are no sentence"] += bool(text.strip())
            continue
        stamp = found[1] or found[2]
        time = float(stamp) if stamp else time
        try:
            told = _decode_sentence(sentence, found[3].encode(), parts, bad)
        except broken as error:
            bad.report_row(f"{path}: line {number}: no AIS sentence: {error or type(error).__name__}", "fix the line")
            continue
        try:
            row = None if told is None else _position_row(told, types)
        except _TruncatedMessageError as error:
            bad.report_row(f"{path}: line {number}: {error}", "fix the line")
            continue
        if row is not None and time is None:
            raise DataError(
                f"{path}: line {number}: no time; the sentences carry none of their own",
                "log them with a tag block (\\c:1577836800*hh\\!AIVDM,...) or unix seconds in front",
            )
        if row is not None:
            yield number, time, *row


def _read_lines(file: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a file; one that is too long for a sentence is cut."""
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line[:MAX_LINE_CHARS].decode("ascii", "replace")
        rest = rest[: MAX_LINE_CHARS + 1]
    if rest:
        yield rest[:MAX_LINE_CHARS].decode("ascii", "replace")


class _TruncatedMessageError(Exception):
    """A message ends before what it must hold."""


def _decode_sentence(
    kind: Any, line: bytes, parts: dict[tuple[Any, ...], list[Any]], bad: BadRowPolicy
) -> dict[str, Any] | None:
    """Return what a sentence tells; of a message of several, None until the last is there."""
    sentence = kind.from_bytes(line)
    if sentence.is_single:
        return dict(sentence.decode().asdict())
    key = (sentence.seq_id, sentence.channel, sentence.frag_cnt)
    held = parts.setdefault(key, [])
    held.append(sentence)
    if len(parts) > MAX_PENDING_MESSAGES:
        del parts[next(iter(parts))]
        bad.counts["messages whose sentences are not all there"] += 1
    if len(held) < sentence.frag_cnt:
        return None
    del parts[key]
    return dict(kind.assemble_from_iterable(held).decode().asdict())


def _position_row(told: dict[str, Any], types: dict[int, str]) -> tuple[Any, ...] | None:
    """Return a position report as a row; remember the ship type that a message tells.

    Raises:
        _Cut: it has no vessel, or a position report lacks a value.
    """
    kind, vessel = told.get("msg_type"), told.get("mmsi")
    if not vessel:
        raise _TruncatedMessageError("a message that is cut before its vessel's number")
    vessel = int(vessel)
    if told.get("ship_type"):
        types[vessel] = str(int(told["ship_type"]))
    if kind not in (1, 2, 3, 18, 19):
        return None
    names = ("lat", "lon", "speed", "course", "heading")
    values = [float(told[name]) for name in names if told.get(name) is not None]
    if len(values) < len(names):
        raise _TruncatedMessageError("a position report that is cut short")
    return (f"{vessel:09d}", types.get(vessel, ""), *values)


def _make_batch(rows: list[tuple[Any, ...]], arrow: Any) -> ColumnBatch:
    names = ("line", "time", "vessel", "type", "lat", "lon", "sog", "cog", "heading")
    columns = dict(zip(names, map(arrow.array, zip(*rows, strict=True)), strict=True))
    lines = columns.pop("line").to_numpy().astype(np.int64)
    return columns, lines
