"""Raw AIS sentences (`!AIVDM`), decoded by pyais; times come from tag blocks or stand before the sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.core.errors import DataError, Failure
from anabatic.trajectory.rows import BadRows
from anabatic.trajectory.tables import Batch, unreadable

NAMES = (".nmea", ".nm4", ".aivdm", ".ais")
BATCH = 50_000
_LINE = re.compile(r"^(?:\\[^\\]*?c:(\d{9,13})[^\\]*\\|(\d{9,13}(?:\.\d+)?)[ ,;\t])?.*?([!$]\w{5},.*)$")


def is_nmea(path: Path) -> bool:
    """True for a file name of raw sentences."""
    return path.suffix.lower() in NAMES


def read(path: Path, bad: BadRows) -> Iterator[Batch]:
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
        with open(path, encoding="ascii", errors="replace") as file:
            for row in _positions(path, file, NMEAMessage, (AISBaseException, ValueError, IndexError), bad):
                rows.append(row)
                if len(rows) == BATCH:
                    yield _batch(rows, pyarrow)
                    rows = []
    except OSError as error:
        raise unreadable(path, error) from error
    if rows:
        yield _batch(rows, pyarrow)


def _positions(
    path: Path, lines: Iterable[str], sentence: Any, broken: tuple[type[Exception], ...], bad: BadRows
) -> Iterator[tuple[Any, ...]]:
    """Yield (line, time, vessel, type, lat, lon, sog, cog, heading) of each position report."""
    types: dict[int, str] = {}
    parts: dict[tuple[Any, ...], list[Any]] = {}
    time: float | None = None
    for number, text in enumerate(lines, start=1):
        found = _LINE.match(text.strip())
        if found is None:
            bad.counts["lines that are no sentence"] += bool(text.strip())
            continue
        stamp = found[1] or found[2]
        time = float(stamp) if stamp else time
        try:
            message = _decoded(sentence.from_bytes(found[3].encode()), parts)
        except broken as error:
            bad.row(f"{path}: line {number}: no AIS sentence: {error}", "mend the line")
            continue
        row = None if message is None else _row(message, types)
        if row is not None and time is None:
            raise DataError(
                f"{path}: line {number}: no time; the sentences carry none of their own",
                "log them with a tag block (\\c:1577836800*hh\\!AIVDM,...) or unix seconds in front",
            )
        if row is not None:
            yield number, time, *row


def _decoded(sentence: Any, parts: dict[tuple[Any, ...], list[Any]]) -> Any:
    """Decode a sentence; of a message of several, None until the last is there."""
    if sentence.is_single:
        return sentence.decode()
    key = (sentence.seq_id, sentence.channel, sentence.frag_cnt)
    held = parts.setdefault(key, [])
    held.append(sentence)
    if len(held) < sentence.frag_cnt:
        return None
    del parts[key]
    return type(sentence).assemble_from_iterable(held).decode()


def _row(message: Any, types: dict[int, str]) -> tuple[Any, ...] | None:
    """Return a position report as a row; remember the ship type that a message tells."""
    told = message.asdict()
    kind, vessel = told["msg_type"], int(told["mmsi"])
    if told.get("ship_type"):
        types[vessel] = str(int(told["ship_type"]))
    if kind not in (1, 2, 3, 18, 19):
        return None
    values = (float(told[name]) for name in ("lat", "lon", "speed", "course", "heading"))
    return (f"{vessel:09d}", types.get(vessel, ""), *values)


def _batch(rows: list[tuple[Any, ...]], arrow: Any) -> Batch:
    names = ("line", "time", "vessel", "type", "lat", "lon", "sog", "cog", "heading")
    columns = dict(zip(names, map(arrow.array, zip(*rows, strict=True)), strict=True))
    lines = columns.pop("line").to_numpy().astype(np.int64)
    return columns, lines
