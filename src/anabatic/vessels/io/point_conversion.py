"""Convert columns of an AIS table to points: parse times, count and remove impossible values."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.config.vessels.tracks import TrackSettings
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.vessels.io.ais_tables import ArrowColumns, ColumnBatch
from anabatic.vessels.io.track import BadRowPolicy, Floats, Ints

POINT_DTYPE = np.dtype(
    [
        *((name, np.int32) for name in ("vessel", "label", "file")),
        *((name, np.int64) for name in ("line", "time")),
        *((name, np.float64) for name in ("lat", "lon")),
        *((name, np.float32) for name in ("sog", "cog", "heading")),
    ]
)
"""56 bytes per point. Vessel, label and file are indices of a `TextTable`."""
PointArray = NDArray[np.void]

SOG_NONE = 102.3
COG_NONE = 360.0
HEADING_NONE = 511.0
"""Values that mean "not available", in knots and degrees (ITU-R M.1371-5, table 48); so do latitude 91 and longitude
181."""


@dataclass
class TextTable:
    """Distinct texts with their indices."""

    texts: list[str] = field(default_factory=list)
    index_by_text: dict[str, int] = field(default_factory=dict)

    def get_index(self, text: str) -> int:
        """Return the index of `text`; add it if it is new."""
        index = self.index_by_text.setdefault(text, len(self.texts))
        if index == len(self.texts):
            self.texts.append(text)
        return index


@dataclass
class ValueExtent:
    """Statistics of the values of a file, for checks of the whole file.

    Attributes:
        num_rows: rows with a position.
        num_lat_out: rows with a latitude over 90 that is not 91.
        num_swapped: of those, rows with a longitude within 90.
        first_line: line of the first of these.
        num_courses: rows with a course.
        max_course: the largest course.
    """

    num_rows: int = 0
    num_lat_out: int = 0
    num_swapped: int = 0
    first_line: int = 0
    num_courses: int = 0
    max_course: float = 0.0

    def require_latitudes(self, path: Path, max_fraction: float) -> None:
        """Check that latitudes and longitudes of a file are not swapped.

        Raises:
            DataError: more than `max_fraction` of its rows are swapped.
        """
        if self.num_rows >= 10 and self.num_swapped > max_fraction * self.num_rows:
            raise DataError(
                f"{path}: line {self.first_line}: {self.num_lat_out} of {self.num_rows} latitudes are over 90: swapped "
                f"with"
                " longitude",
                "name the columns the other way round: --tracks.columns lat=LON_COLUMN lon=LAT_COLUMN",
            )


class PointConverter:
    """Converts the batches of tables to points. Texts (vessels, labels, files) are stored once for all files."""

    def __init__(self, settings: TrackSettings, bad_rows: BadRowPolicy) -> None:
        self.vessels, self.labels, self.files = TextTable(), TextTable(), TextTable()
        self.label_locations: dict[str, str] = {}
        self._settings = settings
        self._bad_rows = bad_rows

    def convert_batches(self, path: Path, batches: Iterator[ColumnBatch]) -> Iterator[PointArray]:
        """Yield the points of one file.

        Raises:
            DataError: a row cannot be read, or the columns of the file are wrong.
        """
        file_index, extent = self.files.get_index(path.name), ValueExtent()
        for columns, lines in batches:
            points = self._convert_batch(path, columns, lines, extent)
            points["file"] = file_index
            yield points
        extent.require_latitudes(path, 0.05)
        if extent.num_courses >= 100 and 0 < extent.max_course < 90:
            log.warn(
                f"{path}: no course is over {extent.max_course:g}: degrees are expected; are these radians or tens?"
            )

    def _convert_batch(self, path: Path, columns: ArrowColumns, lines: Ints, extent: ValueExtent) -> PointArray:
        rows = np.zeros(len(lines), POINT_DTYPE)
        rows["line"] = lines
        keep = np.ones(len(lines), bool)
        for name in ("lat", "lon", "sog", "cog", "heading"):
            if name in columns:
                values, invalid = parse_numbers(columns[name], name, path, lines, self._bad_rows)
                with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is out of range
                    rows[name] = values
                keep &= ~invalid
            else:
                rows[name] = np.nan
        rows["time"], invalid = self._parse_times(path, columns["time"], lines)
        keep &= ~invalid
        rows["vessel"] = self._index_texts(columns, "vessel", self.vessels, path.name.partition(".")[0], len(lines))
        label_column = "label" if "label" in columns else "type"
        num_known = len(self.labels.texts)
        rows["label"] = self._index_texts(columns, label_column, self.labels, "", len(lines), label_column + ":")
        for index in range(num_known, len(self.labels.texts)):
            first_line = lines[np.flatnonzero(rows["label"] == index)[:1]]
            self.label_locations[self.labels.texts[index]] = (
                f"{path}: line {first_line[0]}" if len(first_line) else str(path)
            )
        return self._drop_impossible(path, rows, keep, extent)

    def _parse_times(self, path: Path, column: Any, lines: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        import pyarrow.compute as pc

        times = parse_times(column, self._settings.time_format, self._settings.utc_offset)
        invalid = (times == NO_TIME) & pc.is_valid(column).to_numpy(zero_copy_only=False)
        for index in np.flatnonzero(invalid):
            message = f'{path}: line {lines[index]}: time "{column[int(index)].as_py()}" cannot be read'
            self._bad_rows.report_row(message, "name its format, such as --tracks.time-format '%m/%d/%Y %H:%M:%S'")
        return times, invalid

    def _index_texts(
        self, columns: ArrowColumns, name: str, table: TextTable, default: str, num_rows: int, prefix: str = ""
    ) -> Ints:
        """Return the indices of the texts of a column; that of `default` if the file has no such column."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if name not in columns:
            return np.full(num_rows, table.get_index(prefix + default if default else ""), np.int64)
        column = columns[name]
        if pa.types.is_floating(column.type):  # ids and codes with missing values, as written by pandas
            column = column.cast(pa.int64(), safe=False)
        text = pc.utf8_trim_whitespace(pc.fill_null(column.cast(pa.string()), ""))
        text = pc.replace_substring_regex(text, r"^(\d+)\.0+$", r"\1").dictionary_encode()
        indices = [table.get_index(prefix + value if value else "") for value in text.dictionary.to_pylist()]
        result: Ints = np.array(indices or [0], np.int64)[text.indices.to_numpy(zero_copy_only=False)]
        return result

    def _drop_impossible(
        self, path: Path, rows: PointArray, keep: NDArray[np.bool_], extent: ValueExtent
    ) -> PointArray:
        """Remove points without time or position; not-available values become NaN. Each is counted."""
        counts = self._bad_rows.counts
        is_complete = np.isfinite(rows["lat"]) & np.isfinite(rows["lon"]) & (rows["time"] != NO_TIME)
        counts["points without time or position"] += int((keep & ~is_complete).sum())
        keep &= is_complete
        without_id = keep & (rows["vessel"] == self.vessels.index_by_text.get("", -1))
        counts["points without a vessel id"] += int(without_id.sum())
        keep &= ~without_id
        not_available = keep & ((np.abs(rows["lat"]) == 91) | (np.abs(rows["lon"]) == 181))
        outside = keep & ~not_available & ((np.abs(rows["lat"]) > 90) | (np.abs(rows["lon"]) > 180))
        extent.num_rows += int(keep.sum())
        extent.num_lat_out += int((outside & (np.abs(rows["lat"]) > 90)).sum())
        extent.num_swapped += int((outside & (np.abs(rows["lon"]) <= 90)).sum())
        if outside.any():
            extent.first_line = extent.first_line or int(rows["line"][np.flatnonzero(outside)[0]])
            extent.require_latitudes(path, 0.5)
        counts["points with position not available (91, 181)"] += int(not_available.sum())
        counts["points out of range"] += int(outside.sum())
        keep &= ~not_available & ~outside
        rows = rows[keep]
        if self._settings.clean:
            rows = self._drop_not_available(rows)
        with np.errstate(invalid="ignore"):
            extent.num_courses += int(np.isfinite(rows["cog"]).sum())
            extent.max_course = max(extent.max_course, float(np.nanmax(rows["cog"], initial=0)))
        return rows

    def _drop_not_available(self, rows: PointArray) -> PointArray:
        counts = self._bad_rows.counts
        zero = (rows["lat"] == 0) & (rows["lon"] == 0)
        counts["points at 0 N 0 E"] += int(zero.sum())
        rows = rows[~zero]
        for name, missing_value, minimum, reason in (
            ("sog", SOG_NONE, 0, "speeds not available (102.3)"),
            ("cog", COG_NONE, 0, "courses not available (360)"),
            ("heading", HEADING_NONE, 0, "headings not available (511)"),
        ):
            limit = min(missing_value, 360)
            invalid = (rows[name] < minimum) | (rows[name] >= np.float32(limit))
            counts[reason] += int(invalid.sum())
            rows[name][invalid] = np.nan
        return rows


def parse_numbers(
    column: Any, name: str, path: Path, lines: NDArray[np.int64], bad_rows: BadRowPolicy
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return an Arrow column of `n` rows as numbers (NaN: missing), and a mask of the rows that are not numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    invalid = np.zeros(len(column), bool)
    try:
        numbers = column.cast(pa.float64())
    except pa.ArrowInvalid:
        if not is_text:
            raise
        trimmed = pc.utf8_trim_whitespace(column)
        is_number = pc.match_substring_regex(trimmed, r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
        invalid = pc.fill_null(pc.and_(pc.invert(is_number), pc.greater(pc.utf8_length(trimmed), 0)), False)
        invalid = invalid.to_numpy(zero_copy_only=False)
        for index in np.flatnonzero(invalid):
            value = trimmed[int(index)].as_py()
            bad_rows.report_row(f'{path}: line {lines[index]}: {name} is "{value}", no number', "fix the row")
        numbers = pc.if_else(is_number, trimmed, pa.scalar(None, trimmed.type)).cast(pa.float64())
    values: Floats = pc.fill_null(numbers, float("nan")).to_numpy(zero_copy_only=False)
    return values, invalid


NO_TIME = np.iinfo(np.int64).min
"""Value of a time that is missing or cannot be parsed."""

_EPOCH_NUMBER = re.compile(r"\d{9,13}(\.\d*)?")
_ZONED_TIME = re.compile(r".*\d(Z|[+-]\d\d:?\d\d)")
_FALLBACK_FORMATS = (
    "%Y/%m/%d %H:%M:%S",
    "%Y/%m/%d %H:%M",
    "%Y-%m-%d %H:%M:%S.%f",
    "%Y%m%dT%H%M%S",
    "%Y%m%d %H%M%S",
    "%Y%m%d%H%M%S",
    "%d-%m-%Y %H:%M:%S",
    "%d.%m.%Y %H:%M:%S",
    "%d/%m/%Y %H:%M",
)
"""Formats for `strptime` if the fast parsers fail; leading zeros may be missing."""


def parse_times(column: Any, time_format: str | None, utc_offset: float) -> Ints:
    """Return unix seconds (fractions truncated) of an Arrow column of `n` texts, numbers or timestamps.

    Missing and unreadable times are `NO_TIME`.

    Args:
        column: Arrow array.
        time_format: strptime format; None: detect it.
        utc_offset: hours ahead of UTC of times without a zone.

    Raises:
        DataError: the type of the column cannot represent times.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    arrow_type = column.type
    offset_seconds = round(utc_offset * 3600)
    if pa.types.is_timestamp(arrow_type):
        seconds = pc.floor_temporal(column, unit="second").cast(pa.timestamp("s", arrow_type.tz))
        return _fill_missing(seconds.cast(pa.int64()), 0 if arrow_type.tz else offset_seconds)
    if pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type):
        return _parse_epoch(column)
    if not (pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)):
        raise DataError(f"the time column is {arrow_type}", "times are text, unix seconds or timestamps")
    text = pc.utf8_trim_whitespace(column)
    if time_format is not None:
        return _parse_each(text, (time_format,), offset_seconds)
    return _parse_recognised(text, offset_seconds)


def _parse_recognised(text: Any, offset_seconds: int) -> Ints:
    import pyarrow as pa
    import pyarrow.compute as pc

    first_value = next((value for value in text.to_pylist() if value), "") if len(text) else ""
    if _EPOCH_NUMBER.fullmatch(first_value):
        numeric_text = pc.if_else(
            pc.match_substring_regex(text, r"^\d{9,13}(\.\d*)?$"), text, pa.scalar(None, text.type)
        )
        return _parse_epoch(numeric_text.cast(pa.float64()))
    if "/" in first_value[:3]:
        parsed = pc.strptime(text, format="%d/%m/%Y %H:%M:%S", unit="s", error_is_null=True)
        result = _fill_missing(parsed.cast(pa.int64()), offset_seconds)
    else:
        result = _parse_iso(text, first_value, offset_seconds)
    rest = np.flatnonzero((result == NO_TIME) & (pc.fill_null(pc.utf8_length(text), 0).to_numpy() > 0))
    if len(rest):
        result[rest] = _parse_each(text.take(pa.array(rest)), (None, *_FALLBACK_FORMATS), offset_seconds)
    return result


def _parse_iso(text: Any, first_value: str, offset_seconds: int) -> Ints:
    """Parse ISO 8601, with `T` or a space, with or without fraction and zone."""
    import pyarrow as pa

    has_zone = _ZONED_TIME.fullmatch(first_value) is not None
    arrow_type = pa.timestamp("us", "UTC") if has_zone else pa.timestamp("us")
    try:
        micros = text.cast(arrow_type).cast(pa.int64())
    except pa.ArrowInvalid:
        return _parse_each(text, (None,), offset_seconds)
    seconds = _fill_missing(micros, 0)
    is_valid = seconds != NO_TIME
    seconds[is_valid] = seconds[is_valid] // 1_000_000 - (0 if has_zone else offset_seconds)
    return seconds


def _fill_missing(numbers: Any, offset_seconds: int) -> Ints:
    import pyarrow.compute as pc

    values: Ints = pc.fill_null(numbers, int(NO_TIME)).to_numpy(zero_copy_only=False).astype(np.int64)
    if offset_seconds:
        values[values != NO_TIME] -= offset_seconds
    return values


def _parse_epoch(numbers: Any) -> Ints:
    """Parse unix seconds, milliseconds or microseconds, distinguished by magnitude."""
    import pyarrow as pa

    values = numbers.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    size = np.nanmedian(np.abs(values)) if np.isfinite(values).any() else 0.0
    scale = 1e9 if size > 1e17 else 1e6 if size > 1e14 else 1e3 if size > 1e11 else 1.0
    is_known: NDArray[np.bool_] = np.isfinite(values)
    return np.where(is_known, np.floor(np.where(is_known, values, 0) / scale), NO_TIME).astype(np.int64)


def _parse_each(text: Any, formats: tuple[str | None, ...], offset_seconds: int) -> Ints:
    """Parse one by one, trying each format in order; None is ISO 8601."""
    return np.array([_parse_time(value, formats, offset_seconds) for value in text.to_pylist()], dtype=np.int64)


def _parse_time(value: str | None, formats: tuple[str | None, ...], offset_seconds: int) -> int:
    if not value:
        return int(NO_TIME)
    for pattern in formats:
        try:
            iso = value.replace("Z", "+00:00") if value.endswith("Z") else value
            moment = dt.datetime.fromisoformat(iso) if pattern is None else dt.datetime.strptime(value, pattern)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=dt.timezone.utc) - dt.timedelta(seconds=offset_seconds)
            return int(moment.timestamp() // 1)
        except (ValueError, OverflowError):
            continue
    return int(NO_TIME)
