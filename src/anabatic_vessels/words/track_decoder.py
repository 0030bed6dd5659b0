"""Decode words to points, as precisely as each format allows.

| format | time | position | speed | course |
|---|---|---|---|---|
| `char` | second | centre of the H3 cell of 15 digits | five bands | eight sectors |
| `cell` | second | centre of the cell of resolution 9: its digits start three bits early | as above | as above |
| `compact` | start to the second, then half a time-step word | centre of the H3 cell | half a speed word | 5 degrees |
| `motion` | - | - | - | - |
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from anabatic.core import extras
from anabatic.core.errors import DataError
from anabatic.core.formatting import parse_whole
from anabatic_vessels.io.track import Track
from anabatic_vessels.words.track_encoder import STEP_MIDDLES
from anabatic_vessels.words.vocabulary import COURSE_WORDS, POINT_END, SPEED_EDGES, SPEED_WORDS, STEP_EDGES, WordSpec

SPEED_BAND_KNOTS = (1.0, 3.5, 7.5, 12.5, 17.5)
"""Knots of the source's five speed words; the last has no upper end."""
_CLOCK_UNITS = ("YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND")
_STEP_SECONDS = {f"DT_{edge}": middle for edge, middle in zip(STEP_EDGES, STEP_MIDDLES, strict=True)}


def _build_speeds() -> dict[str, float]:
    upper_edges = (*SPEED_EDGES[1:], SPEED_EDGES[-1] + 1)
    knots_by_word = {f"SPD_{low}": (low + high - 1) / 20 for low, high in zip(SPEED_EDGES, upper_edges, strict=True)}
    return {**knots_by_word, "SPD_NONE": np.nan, **dict(zip(SPEED_WORDS, SPEED_BAND_KNOTS, strict=True))}


_SPEED_KNOTS = _build_speeds()
_COURSE_DEGREES = {word: 45.0 * index for index, word in enumerate(COURSE_WORDS)} | {
    "COG_UNKNOWN": np.nan,
    "COG_NONE": np.nan,
}


@dataclass
class _DecoderState:
    """State of the decoder: each word updates one part, POINT_END emits a point."""

    clock: dict[str, int]
    second: int
    cell: str
    base: int
    digits: list[int]
    sog: float = np.nan
    cog: float = np.nan


def decode_track(text: str, spec: WordSpec, vessel: str = "") -> Track:
    """Return the points of a segment's words; headings are NaN: no format encodes them.

    Args:
        text: the words; class words are skipped.
        spec: spec of the words.
        vessel: id of the returned track.

    Raises:
        DataError: the words do not match the spec, or contain no position.
        ConfigError: h3 is not installed.
    """
    if spec.format == "motion":
        raise DataError(
            "words of the format motion hold no position",
            "name the AIS files beside them, or use compact, cell or char",
        )
    cells = extras.import_optional("h3.api.basic_int", "reading positions from words")
    rows: list[tuple[float, ...]] = []
    for point in _iter_points(text):
        cell = _build_cell(point, spec)
        if not cells.is_valid_cell(cell):
            raise DataError(f"point {len(rows) + 1}: the words make no H3 cell ({cell:x})", "the words are damaged")
        rows.append((point.second, *cells.cell_to_latlng(cell), point.sog, point.cog, np.nan))
    if not rows:
        raise DataError(f"no {POINT_END} among the words", "the words are damaged")
    columns = np.array(rows, np.float64).T
    lat, lon, sog, cog, heading = columns[1:]
    return Track(vessel, "", columns[0].astype(np.int64), lat, lon, sog, cog, heading)


def _iter_points(text: str) -> Iterator[_DecoderState]:
    point = _DecoderState({}, 0, "", -1, [])
    for word in text.split():
        if word == POINT_END:
            yield point
            continue
        head, _, value = word.partition("_")
        if head in _CLOCK_UNITS:
            point.clock[head] = _parse_whole(value, word)
            if head == _CLOCK_UNITS[-1]:
                point.second = _clock_to_seconds(point.clock)
                point.cell, point.digits = "", []
        elif head == "H3":
            _apply_position_word(point, value, word)
        elif head == "DT":
            point.second += int(_look_up_word(_STEP_SECONDS, word))
        elif head == "SPD":
            point.sog = _look_up_word(_SPEED_KNOTS, word)
        elif head == "COG":
            point.cog = _COURSE_DEGREES[word] if word in _COURSE_DEGREES else float(_parse_whole(value, word))


def _look_up_word(table: Mapping[str, float], word: str) -> float:
    if word not in table:
        raise DataError(f"{word} is not a word of any format", "the words are damaged, or of another version")
    return table[word]


def _parse_whole(text: str, word: str) -> int:
    if (number := parse_whole(text)) is None:
        raise DataError(f"{word} is not a word of any format", "the words are damaged, or of another version")
    return number


def _clock_to_seconds(clock: dict[str, int]) -> int:
    try:
        year, month, day, hour, minute, second = (clock[unit] for unit in _CLOCK_UNITS)
        moment = dt.datetime(year, month, day, hour, minute, second, tzinfo=dt.timezone.utc)
    except (KeyError, ValueError) as error:
        raise DataError(f"time words make no time: {clock}", "the words are damaged") from error
    return int(moment.timestamp())


def _apply_position_word(point: _DecoderState, value: str, word: str) -> None:
    """Apply a word of the position: a character, or a digit of the format `cell` or `compact`."""
    kind, _, rest = value.partition("_")
    if kind == "CHAR":
        point.cell += rest.partition("_")[2]
    elif kind == "base":
        point.base, point.digits = _parse_whole(rest, word), []
    elif kind == "cell":
        point.digits.append(_parse_whole(rest.partition("_")[2], word))
    elif kind != "res":
        level = _parse_whole(kind, word)
        if level > len(point.digits) + 1 or level < 1:
            raise DataError(f"{word} follows digits of level {len(point.digits)}", "the words are damaged")
        point.digits[level - 1 :] = [_parse_whole(rest, word)]


def _build_cell(point: _DecoderState, spec: WordSpec) -> int:
    """Assemble the H3 index: mode 1, resolution, base cell, three bits per digit, the rest ones (h3geo.org)."""
    if spec.format == "char":
        try:
            return int(point.cell, 16)
        except ValueError:
            return 0
    digits = point.digits[1:] if spec.format == "cell" else point.digits
    if point.base < 0 or len(digits) != (9 if spec.format == "cell" else spec.resolution):
        raise DataError(
            f"{len(digits)} digits of a position", f"words of {spec.spec_name} have another number: damaged?"
        )
    index = 1 << 59 | len(digits) << 52 | point.base << 45 | (1 << 45) - 1
    for level, digit in enumerate(digits, start=1):
        shift = 3 * (15 - level)
        index = index & ~(7 << shift) | digit << shift
    return index
