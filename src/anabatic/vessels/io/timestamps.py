"""Parse the times of AIS files to unix seconds."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError
from anabatic.vessels.io.track import Ints

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
