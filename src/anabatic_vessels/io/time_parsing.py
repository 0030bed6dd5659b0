"""Parse the times of AIS tables: ISO 8601, unix numbers, and dates in the orders that countries use."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError
from anabatic_vessels.io.track import Ints

NO_TIME = np.iinfo(np.int64).min
"""Value of a time that is missing or cannot be parsed."""
DateOrder = Literal["day", "month"]
"""First part of dates such as 04/03/2026."""

_EPOCH_NUMBER = re.compile(r"\d{9,19}(\.\d*)?")
_ZONED_TIME = re.compile(r".*\d(Z|[+-]\d\d:?\d\d)")
_CLOCK = re.compile(r"\d{1,2}:\d\d(:\d\d([.,]\d+)?)?( ?[AaPp][Mm])?")
_SPLIT_DATE = re.compile(r"(\d{1,2})[/-](\d{1,2})[/-]\d{4}(?=[ T,]|$)")
_ZONE = re.compile(
    r"^(?P<time>.*\d:?\d\d(?:[.,]\d+)?(?: ?[ap]\.?m\.?)?)"
    r"\s*(?:(?:UTC|GMT)?(?P<hours>[+-]\d\d):?(?P<minutes>\d\d)?\s*(?:UTC|GMT|Z)?|(?P<utc>UTC|GMT|Z))$",
    re.IGNORECASE,
)
"""A time with the zone behind it, as ISO 8601 or as Go (`+0000 UTC`) and people write it."""
_ZERO_ZONE = re.compile(r"(?i)\s*(?:\+00:?00\s*(?:UTC|GMT|Z)?|UTC|GMT|Z)$")
_FALLBACK_FORMATS = (
    "%Y/%m/%d %H:%M:%S",
    "%Y/%m/%d %H:%M",
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d %H:%M:",
    "%Y%m%dT%H%M%S",
    "%Y%m%d %H%M%S",
    "%Y%m%d_%H%M%S",
    "%Y%m%d%H%M%S",
    "%d.%m.%Y %H:%M:%S",
    "%d.%m.%Y %H:%M",
)
"""Formats for `strptime` if the fast parsers fail; leading zeros may be missing."""
_CLOCKS = ("%H:%M:%S", "%H:%M", "%I:%M:%S %p", "%I:%M %p")
_ORDERED_FORMATS: dict[DateOrder, tuple[str, ...]] = {
    "day": tuple(f"%d/%m/%Y {clock}" for clock in _CLOCKS),
    "month": tuple(f"%m/%d/%Y {clock}" for clock in _CLOCKS),
}


def parse_times(column: Any, time_format: str | None, utc_offset: float, date_order: DateOrder | None = None) -> Ints:
    """Return unix seconds (fractions truncated) of an Arrow column of `n` texts, numbers or timestamps.

    Missing and unreadable times are `NO_TIME`.

    Args:
        column: Arrow array.
        time_format: strptime format; None: detect it.
        utc_offset: hours ahead of UTC of times without a zone.
        date_order: order of dates with the year at the end; None: as the dates of the column say.

    Raises:
        DataError: the type of the column cannot represent times, or its dates can be read in two ways.
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
    return _parse_recognised(text, offset_seconds, date_order)


def join_dates(dates: Any, times: Any) -> Any:
    """Return dates with the times of day behind them, if a column of times has no dates; else the times."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not all(pa.types.is_string(column.type) for column in (dates, times)):
        return times
    first = next((value.strip() for value in times.to_pylist() if value and value.strip()), "")
    return pc.binary_join_element_wise(dates, times, " ") if _CLOCK.fullmatch(first) else times


def find_date_order(text: Any) -> DateOrder | None:
    """Return what stands first in the dates of a column that end in the year; None: there are none, or it is the same.

    Raises:
        DataError: all of them can be read both ways.
    """
    import pyarrow as pa

    if not (pa.types.is_string(text.type) or pa.types.is_large_string(text.type)):
        return None
    matches = [match for value in set(text.to_pylist()) if value and (match := _SPLIT_DATE.match(value.strip()))]
    if any(int(match[1]) > 12 for match in matches):
        return "day"
    if any(int(match[2]) > 12 for match in matches):
        return "month"
    unclear = min((match for match in matches if match[1] != match[2]), key=lambda match: match.string, default=None)
    if unclear is None:
        return None
    value, mark = unclear.string.strip(), "-" if "-" in unclear[0] else "/"
    clock = next((clock for clock in _CLOCKS if _parse_time(value, (f"%d{mark}%m{mark}%Y {clock}",), 0) != NO_TIME), "")
    readings = [f"{unclear[0][-4:]}-{int(unclear[at]):02d}-{int(unclear[3 - at]):02d}" for at in (2, 1)]
    formats = [f"--tracks.time-format '%{order}%Y {clock}'" for order in (f"d{mark}%m{mark}", f"m{mark}%d{mark}")]
    raise DataError(
        f'the time "{value}" is on {readings[0]} or on {readings[1]}, and no other date says which',
        " or ".join(f"{option} for {reading}" for option, reading in zip(formats, readings, strict=True)),
    )


def _parse_recognised(text: Any, offset_seconds: int, date_order: DateOrder | None) -> Ints:
    import pyarrow as pa
    import pyarrow.compute as pc

    first_value = next((value for value in text.to_pylist() if value), "") if len(text) else ""
    if "年" in first_value:
        for pattern, mark in (("[年月]", "-"), ("日 *", " "), ("[时分]", ":"), ("秒", "")):
            text = pc.replace_substring_regex(text, pattern, mark)
    if (zero := _ZERO_ZONE.search(first_value)) and zero[0] != "Z":
        text = pc.replace_substring_regex(text, _ZERO_ZONE.pattern, "Z")
    first_value = next((value for value in text.to_pylist() if value), "")
    if _EPOCH_NUMBER.fullmatch(first_value):
        numeric_text = pc.if_else(
            pc.match_substring_regex(text, r"^\d{9,19}(\.\d*)?$"), text, pa.scalar(None, text.type)
        )
        return _parse_epoch(numeric_text.cast(pa.float64()))
    if _SPLIT_DATE.match(first_value):
        order = date_order or find_date_order(text) or "day"
        text = pc.replace_substring_regex(text, r"^(\d{1,2})[/-](\d{1,2})[/-](\d{4})[T,]? *", r"\1/\2/\3 ")
        text = pc.replace_substring_regex(text, r"(:\d\d)[.,]\d+", r"\1")
        parsed = pc.strptime(text, format=_ORDERED_FORMATS[order][0], unit="s", error_is_null=True)
        result = _fill_missing(parsed.cast(pa.int64()), offset_seconds)
        formats: tuple[str | None, ...] = _ORDERED_FORMATS[order]
    else:
        result = _parse_iso(text, first_value, offset_seconds)
        formats = (None, *_FALLBACK_FORMATS)
    rest = np.flatnonzero((result == NO_TIME) & (pc.fill_null(pc.utf8_length(text), 0).to_numpy() > 0))
    if len(rest):
        result[rest] = _parse_each(text.take(pa.array(rest)), formats, offset_seconds)
    return result


def _parse_iso(text: Any, first_value: str, offset_seconds: int) -> Ints:
    """Parse ISO 8601, with `T` or a space, with or without fraction and zone."""
    import pyarrow as pa

    if ":" not in first_value:
        return np.full(len(text), NO_TIME, np.int64)
    has_zone = _ZONED_TIME.fullmatch(first_value) is not None
    arrow_type = pa.timestamp("us", "UTC") if has_zone else pa.timestamp("us")
    try:
        micros = text.cast(arrow_type).cast(pa.int64())
    except pa.ArrowInvalid:
        return np.full(len(text), NO_TIME, np.int64)
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
    for text, seconds_ahead in _split_zone(value, offset_seconds):
        for pattern in formats:
            try:
                moment = _parse_iso_text(text) if pattern is None else dt.datetime.strptime(text, pattern)
                if moment.tzinfo is None:
                    moment = moment.replace(tzinfo=dt.timezone.utc) - dt.timedelta(seconds=seconds_ahead)
                return int(moment.timestamp() // 1)
            except (ValueError, OverflowError):
                continue
    return int(NO_TIME)


def _split_zone(value: str, offset_seconds: int) -> Iterator[tuple[str, int]]:
    """Yield a time as it is, with the seconds ahead of UTC if it has no zone, then without the zone that it ends in."""
    yield value, offset_seconds
    match = _ZONE.match(value)
    if match is not None:
        minutes = int(match["hours"] or 0) * 60
        minutes += int(match["minutes"] or 0) * (-1 if (match["hours"] or "").startswith("-") else 1)
        yield match["time"].strip(), minutes * 60


def _parse_iso_text(text: str) -> dt.datetime:
    if len(text) <= len("2026-03-04"):
        raise ValueError(f"{text} has no time of day")
    return dt.datetime.fromisoformat(re.sub(r"(:\d\d)[.,]\d+", r"\1", text))
