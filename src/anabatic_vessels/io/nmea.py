"""Raw AIS sentences (`!AIVDM`), decoded by pyais; times come from tag blocks or precede the sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from anabatic.core import extras
from anabatic.core.errors import BROKEN_DATA_ERRORS, DataError
from anabatic_vessels.io.ais_tables import ColumnBatch, unreadable_file_error
from anabatic_vessels.io.track import NO_POSITION, BadRowPolicy

NMEA_SUFFIXES = (".nmea", ".nm4", ".aivdm", ".ais")
ROWS_PER_BATCH = 50_000
MAX_LINE_CHARS = 4096
"""Maximum characters of a line; a sentence has 82, the tag block before it some more."""
MAX_PENDING_MESSAGES = 1000
"""Maximum incomplete messages; beyond it the oldest is dropped."""
_BLOCK_BYTES = 1 << 20
_SENTENCE_LINE = re.compile(r"^(?:\\[^\\]*?c:(\d{9,13})[^\\]*\\|(\d{9,13}(?:\.\d+)?)[ ,;\t])?.*?([!$]\w{5},.*)$")


def is_nmea_file(path: Path) -> bool:
    """Return whether a file name is that of raw sentences."""
    return path.suffix.lower() in NMEA_SUFFIXES


def read_nmea(path: Path, bad_rows: BadRowPolicy) -> Iterator[ColumnBatch]:
    """Yield position reports (messages 1, 2, 3, 18, 19) with the ship type of messages 5, 19 and 24.

    A position before the ship type of its vessel has no type; the majority over all positions decides.

    Raises:
        DataError: a sentence is broken or has no time.
        ConfigError: pyais is not installed.
    """
    message_type = extras.import_optional("pyais", f"reading {path.name}").NMEAMessage
    decoding_error = extras.import_optional("pyais.exceptions", f"reading {path.name}").AISBaseException
    import pyarrow

    rows: list[tuple[Any, ...]] = []
    try:
        with open(path, "rb") as file:
            for row in _read_positions(
                path, _read_lines(file), message_type, (decoding_error, *BROKEN_DATA_ERRORS), bad_rows
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
    path: Path,
    lines: Iterable[str],
    message_class: Any,
    decode_errors: tuple[type[Exception], ...],
    bad_rows: BadRowPolicy,
) -> Iterator[tuple[Any, ...]]:
    """Yield (line, time, vessel, type, lat, lon, sog, cog, heading) of each position report."""
    ship_types: dict[int, str] = {}
    pending: dict[tuple[Any, ...], list[Any]] = {}
    time: float | None = None
    for line_number, text in enumerate(lines, start=1):
        match = _SENTENCE_LINE.match(text.strip())
        if match is None:
            bad_rows.counts["lines that are no sentence"] += bool(text.strip())
            continue
        timestamp = match[1] or match[2]
        time = float(timestamp) if timestamp else time
        try:
            message = _decode_sentence(message_class, match[3].encode(), pending, bad_rows)
        except decode_errors as error:
            bad_rows.report_row(
                f"{path}: line {line_number}: no AIS sentence: {error or type(error).__name__}", "fix the line"
            )
            continue
        try:
            row = None if message is None else _position_row(message, ship_types)
            bad_rows.counts[NO_POSITION] += message is not None and row is None
        except _TruncatedMessageError as error:
            bad_rows.report_row(f"{path}: line {line_number}: {error}", "fix the line")
            continue
        if row is not None and time is None:
            raise DataError(
                f"{path}: line {line_number}: no time; the sentences carry none of their own",
                "log them with a tag block (\\c:1577836800*hh\\!AIVDM,...) or unix seconds in front",
            )
        if row is not None:
            yield line_number, time, *row


def _read_lines(file: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a file; lines too long for a sentence are truncated."""
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line[:MAX_LINE_CHARS].decode("ascii", "replace")
        rest = rest[: MAX_LINE_CHARS + 1]
    if rest:
        yield rest[:MAX_LINE_CHARS].decode("ascii", "replace")


class _TruncatedMessageError(Exception):
    """A message lacks required fields."""


def _decode_sentence(
    message_class: Any, line: bytes, pending: dict[tuple[Any, ...], list[Any]], bad_rows: BadRowPolicy
) -> dict[str, Any] | None:
    """Return the fields of a message; None while sentences of it are missing."""
    sentence = message_class.from_bytes(line)
    if sentence.is_single:
        return dict(sentence.decode().asdict())
    key = (sentence.seq_id, sentence.channel, sentence.frag_cnt)
    fragments = pending.setdefault(key, [])
    fragments.append(sentence)
    if len(pending) > MAX_PENDING_MESSAGES:
        del pending[next(iter(pending))]
        bad_rows.counts["messages whose sentences are not all there"] += 1
    if len(fragments) < sentence.frag_cnt:
        return None
    del pending[key]
    return dict(message_class.assemble_from_iterable(fragments).decode().asdict())


def _position_row(message: dict[str, Any], ship_types: dict[int, str]) -> tuple[Any, ...] | None:
    """Return a position report as a row, None for other messages; store the ship type of a message in `ship_types`.

    Raises:
        _TruncatedMessageError: the message has no vessel, or a position report lacks a value.
    """
    message_type, vessel = message.get("msg_type"), message.get("mmsi")
    if not vessel:
        raise _TruncatedMessageError("a message that is cut before its vessel's number")
    vessel = int(vessel)
    if message.get("ship_type"):
        ship_types[vessel] = str(int(message["ship_type"]))
    if message_type not in (1, 2, 3, 18, 19):
        return None
    names = ("lat", "lon", "speed", "course", "heading")
    values = [float(message[name]) for name in names if message.get(name) is not None]
    if len(values) < len(names):
        raise _TruncatedMessageError("a position report that is cut short")
    return (f"{vessel:09d}", ship_types.get(vessel, ""), *values)


def _make_batch(rows: list[tuple[Any, ...]], arrow: Any) -> ColumnBatch:
    names = ("line", "time", "vessel", "type", "lat", "lon", "sog", "cog", "heading")
    columns = dict(zip(names, map(arrow.array, zip(*rows, strict=True)), strict=True))
    lines = columns.pop("line").to_numpy().astype(np.int64)
    return ColumnBatch(columns, lines)
