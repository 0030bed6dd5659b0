"""JSON lines of AIS messages: one object a line, flat or nested as aisstream.io publishes them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.data.readers.file_formats import iter_numbered_lines, open_lines
from anabatic_vessels.io.ais_tables import ColumnBatch
from anabatic_vessels.io.column_names import (
    COLUMN_ALIASES,
    REQUIRED_COLUMNS,
    WHOLE_FILE,
    ColumnLayout,
    find_columns,
    list_names,
    match_columns,
    normalize_name,
)
from anabatic_vessels.io.track import NO_POSITION, BadRowPolicy

JSON_SUFFIXES = tuple(f"{suffix}{packed}" for suffix in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst"))
"""Suffixes of JSON lines; rows of words have the same."""
ROWS_PER_BATCH = 50_000
_MAX_LAYOUTS = 1000
"""Maximum distinct sets of keys that are remembered."""
_OTHER_ROWS = ("text", "original_text", "predicted_class", "masked_text")
"""Keys of rows of words and of predictions."""

Values = dict[str, Any]
"""Values of an object by key; keys of inner objects are joined by dots."""


def is_json_file(path: Path) -> bool:
    """Return whether a file name is that of JSON lines."""
    return path.name.lower().endswith(JSON_SUFFIXES)


def holds_messages(path: Path) -> bool:
    """Return whether one of the first objects of JSON lines is an AIS message: it has a position or an MMSI."""
    if not is_json_file(path):
        return False
    try:
        with closing(open_lines(path)) as stream:
            for _, _, line in islice(iter_numbered_lines(stream), 20):
                row = None if isinstance(line, int) else _parse_line(line)
                if isinstance(row, dict):
                    names = match_columns(list(_by_leaf(row)), str(path), {}).names
                    is_message = {"lat", "lon"} <= names.keys() or "mmsi" in normalize_name(names.get("vessel", ""))
                    return is_message and not any(key in row for key in _OTHER_ROWS)
    except (OSError, EOFError, zlib.error, DataError):
        return False
    return False


def read_messages(path: Path, column_map: dict[str, str], bad_rows: BadRowPolicy) -> Iterator[ColumnBatch]:
    """Yield the positions of JSON lines, with the ship types of messages that have no position.

    Raises:
        DataError: a line is broken, no object has a position or none has a vessel, or the file cannot be read.
    """
    messages = _Messages(path, column_map)
    rows: list[tuple[Any, ...]] = []
    try:
        with closing(open_lines(path)) as stream:
            for line_number, _, line in iter_numbered_lines(stream):
                row = f"{line:,} bytes long" if isinstance(line, int) else _parse_line(line)
                if isinstance(row, str):
                    bad_rows.report_row(f"{path}: line {line_number}: {row}", "write one JSON object a line")
                elif row is not None:
                    values = messages.read_values(row, bad_rows)
                    if values is not None:
                        rows.append((line_number, *values))
                if len(rows) == ROWS_PER_BATCH:
                    yield messages.make_batch(rows)
                    rows = []
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}", "the file is cut short or damaged") from error
    if rows or not messages.has_positions:
        yield messages.make_batch(rows)


@dataclass
class _Messages:
    """Facts about the messages of one file.

    Attributes:
        path: the file.
        column_map: column -> key, set by the user.
        layouts: columns by the keys of an object.
        key_counts: number of objects that have a key.
        used: column -> the first key from which it was read.
        factors: column -> factor to knots or degrees.
        used_keys: all keys that were read.
        ship_types: vessel -> its ship type.
        has_positions: whether a batch was made.
    """

    path: Path
    column_map: dict[str, str]
    layouts: dict[tuple[str, ...], ColumnLayout] = field(default_factory=dict)
    key_counts: Counter[str] = field(default_factory=Counter)
    used: dict[str, str] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    used_keys: set[str] = field(default_factory=set)
    ship_types: dict[str, str] = field(default_factory=dict)
    has_positions: bool = False

    def read_values(self, row: dict[str, Any], bad_rows: BadRowPolicy) -> list[str | None] | None:
        """Return the texts of a position in the order of `COLUMN_ALIASES`; None: the object holds no position."""
        leaves = _by_leaf(row)
        self.key_counts.update(key for key, _ in leaves.values())
        layout = self._find_layout(tuple(leaves))
        read = {column: leaves[name] for column, name in layout.names.items()}
        self.used_keys.update(key for key, _ in read.values())
        texts = {column: _to_text(value) for column, (_, value) in read.items()}
        _drop_message_type(texts, leaves)
        vessel = texts.get("vessel") or ""
        kind = str(leaves.get("MessageType", ("", "PositionReport"))[1])
        is_position = kind.endswith(("PositionReport", "BroadcastMessage"))
        if texts.get("type") and texts["type"] != "0":
            self.ship_types[vessel] = texts["type"] or ""
        elif vessel in self.ship_types:
            texts["type"] = self.ship_types[vessel]
        if not is_position or not texts.get("lat") or not texts.get("lon"):
            bad_rows.counts[NO_POSITION] += 1
            return None
        for column in texts.keys() & read.keys():
            self.used.setdefault(column, read[column][0])
        if texts.get("type") is not None:
            self.used.setdefault("type", "type")
        self.factors.update(layout.factors)
        return [texts.get(column) for column in COLUMN_ALIASES]

    def _find_layout(self, names: tuple[str, ...]) -> ColumnLayout:
        layout = self.layouts.get(names)
        if layout is None:
            present = set(names)
            fitted = {column: _fit_spec(spec, present) for column, spec in self.column_map.items()}
            column_map = {column: spec for column, spec in fitted.items() if spec or column not in COLUMN_ALIASES}
            layout = match_columns(names, str(self.path), column_map)
            if len(self.layouts) < _MAX_LAYOUTS:
                self.layouts[names] = layout
        return layout

    def make_batch(self, rows: list[tuple[Any, ...]]) -> ColumnBatch:
        """Return rows as Arrow columns.

        Raises:
            DataError: no object has a position, a time or a vessel.
        """
        import pyarrow

        is_whole_file = self.column_map.get("vessel") == WHOLE_FILE
        if any(name not in self.used for name in REQUIRED_COLUMNS) or not ("vessel" in self.used or is_whole_file):
            names = list(dict.fromkeys(key.rpartition(".")[2] for key in self.key_counts))
            find_columns(names, str(self.path), self.column_map)
        unmet = [spec for column, spec in self.column_map.items() if column not in self.used and spec != WHOLE_FILE]
        if unmet and not self.has_positions:
            raise DataError(f'{self.path}: no key "{unmet[0]}"', f"the file has {list_names(list(self.key_counts))}")
        self.has_positions = True
        unused = tuple(f"{key} ({count:,})" for key, count in self.key_counts.items() if key not in self.used_keys)
        layout = ColumnLayout(self.used, self.factors, unused, len(self.key_counts), kind="keys")
        texts = zip(*(row[1:] for row in rows), strict=True) if rows else [()] * len(COLUMN_ALIASES)
        columns = {
            name: pyarrow.array(values, pyarrow.string())
            for name, values in zip(COLUMN_ALIASES, texts, strict=True)
            if name in self.used or name in REQUIRED_COLUMNS
        }
        return ColumnBatch(columns, np.array([row[0] for row in rows], np.int64), layout)


def _drop_message_type(texts: dict[str, str | None], leaves: dict[str, tuple[str, Any]]) -> None:
    """Remove what gpsd writes of the message, not of the ship: `"class": "AIS"`, and its number as `type`."""
    if texts.get("label") == "AIS":
        del texts["label"]
        if "type" in leaves and leaves["type"][1] == leaves.get("shiptype", leaves["type"])[1]:
            texts.pop("type", None)


def _fit_spec(spec: str, names: set[str]) -> str:
    """Return what the user named, a key or the last part of one, as it is in an object; empty: it is not there."""
    key, bracket, unit = spec.partition("[")
    name = next((name for name in (key, key.rpartition(".")[2]) if name in names), "")
    return spec if spec in names or spec == WHOLE_FILE else f"{name}{bracket}{unit}" if name else ""


def _parse_line(line: bytes) -> dict[str, Any] | str | None:
    """Return the object of a line, or an error message; None: the line is empty."""
    if not line.strip():
        return None
    try:
        row = json_reader.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        return f"broken JSON: {error}"
    return row if isinstance(row, dict) else f"{type(row).__name__}, not an object"


def _by_leaf(row: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return name -> (key, value) of what an object holds; of equal names, the later (inner) one has its whole key."""
    leaves: dict[str, tuple[str, Any]] = {}
    for key, value in _flatten(row):
        name = key.rpartition(".")[2]
        leaves[key if name in leaves else name] = (key, value)
    return leaves


def _flatten(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key with its value; keys of inner objects behind those of the outer ones, joined by dots.

    A list `coordinates` is that of GeoJSON: longitude, latitude; so is the type of a point or a feature.
    """
    inner = []
    for key, value in row.items():
        if isinstance(value, dict):
            inner.append((key, value))
        elif key == "coordinates" and isinstance(value, list) and len(value) >= 2:
            yield f"{prefix}lon", value[0]
            yield f"{prefix}lat", value[1]
        elif (key, value) not in (("type", "Point"), ("type", "Feature")):
            yield f"{prefix}{key}", value
    for key, value in inner:
        yield from _flatten(value, f"{prefix}{key}.")


def _to_text(value: Any) -> str | None:
    """Return a value as it would be in a table."""
    if value is None or isinstance(value, str):
        return value
    return repr(value) if isinstance(value, float) else str(value)
