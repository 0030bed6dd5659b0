"""Times as they stand in AIS files, to unix seconds."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError
from anabatic.vessels.io.track import Ints

NO_TIME = np.iinfo(np.int64).min
"""Stands for a time that is missing or cannot be read."""

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
"""What `strptime` is tried with when the fast parsers refuse a text; a digit may stand without its zero."""


def parse_times(column: Any, time_format: str | None, utc_offset: float) -> Ints:
    """Return unix seconds (fractions cut off) of an Arrow column of `n` texts, numbers or timestamps.

    `NO_TIME` stands where there is nothing or nothing that can be read.

    Args:
        column: Arrow array.
        time_format: strptime format; None: recognised.
        utc_offset: hours ahead of UTC of times without a zone.

    Raises:
        DataError: the column is of a type that holds no time.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    ahead = round(utc_offset * 3600)
    if pa.types.is_timestamp(kind):
        whole = pc.floor_temporal(column, unit="second").cast(pa.timestamp("s", kind.tz))
        return _fill_missing(whole.cast(pa.int64()), 0 if kind.tz else ahead)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return _parse_epoch(column)
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"the time column is {kind}", "times are text, unix seconds or timestamps")
    text = pc.utf8_trim_whitespace(column)
    if time_format is not None:
        return _parse_each(text, (time_format,), ahead)
    return _parse_recognised(text, ahead)


def _parse_recognised(text: Any, ahead: int) -> Ints:
    import pyarrow as pa
    import pyarrow.compute as pc

    first = next((value for value in text.to_pylist() if value), "") if len(text) else ""
    if _EPOCH_NUMBER.fullmatch(first):
        number = pc.if_else(pc.match_substring_regex(text, r"^\d{9,13}(\.\d*)?$"), text, pa.scalar(None, text.type))
        return _parse_epoch(number.cast(pa.float64()))
    if "/" in first[:3]:
        found = pc.strptime(text, format="%d/%m/%Y %H:%M:%S", unit="s", error_is_null=True)
        result = _fill_missing(found.cast(pa.int64()), ahead)
    else:
        result = _parse_iso(text, first, ahead)
    rest = np.flatnonzero((result == NO_TIME) & (pc.fill_null(pc.utf8_length(text), 0).to_numpy() > 0))
    if len(rest):
        result[rest] = _parse_each(text.take(pa.array(rest)), (None, *_FALLBACK_FORMATS), ahead)
    return result


def _parse_iso(text: Any, first: str, ahead: int) -> Ints:
    """ISO 8601, `T` or a space in the middle, with or without fraction and zone."""
    import pyarrow as pa

    zoned = _ZONED_TIME.fullmatch(first) is not None
    kind = pa.timestamp("us", "UTC") if zoned else pa.timestamp("us")
    try:
        micros = text.cast(kind).cast(pa.int64())
    except pa.ArrowInvalid:
        return _parse_each(text, (None,), ahead)
    found = _fill_missing(micros, 0)
    good = found != NO_TIME
    found[good] = found[good] // 1_000_000 - (0 if zoned else ahead)
    return found


def _fill_missing(numbers: Any, ahead: int) -> Ints:
    import pyarrow.compute as pc

    values: Ints = pc.fill_null(numbers, int(NO_TIME)).to_numpy(zero_copy_only=False).astype(np.int64)
    if ahead:
        values[values != NO_TIME] -= ahead
    return values


def _parse_epoch(numbers: Any) -> Ints:
    """Unix seconds, milliseconds or microseconds, distinguished by their size."""
    import pyarrow as pa

    values = numbers.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    size = np.nanmedian(np.abs(values)) if np.isfinite(values).any() else 0.0
    scale = 1e9 if size > 1e17 else 1e6 if size > 1e14 else 1e3 if size > 1e11 else 1.0
    known: NDArray[np.bool_] = np.isfinite(values)
    return np.where(known, np.floor(np.where(known, values, 0) / scale), NO_TIME).astype(np.int64)


def _parse_each(text: Any, formats: tuple[str | None, ...], ahead: int) -> Ints:
    """One by one, each format in turn; None is ISO 8601."""
    return np.array([_parse_time(value, formats, ahead) for value in text.to_pylist()], dtype=np.int64)


def _parse_time(value: str | None, formats: tuple[str | None, ...], ahead: int) -> int:
    if not value:
        return int(NO_TIME)
    for parse in formats:
        try:
            iso = value.replace("Z", "+00:00") if value.endswith("Z") else value
            when = dt.datetime.fromisoformat(iso) if parse is None else dt.datetime.strptime(value, parse)
            if when.tzinfo is None:
                when = when.replace(tzinfo=dt.timezone.utc) - dt.timedelta(seconds=ahead)
            return int(when.timestamp() // 1)
        except (ValueError, OverflowError):
            continue
    return int(NO_TIME)
