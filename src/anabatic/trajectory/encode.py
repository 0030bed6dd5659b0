"""Points to words: the two formats of the source, and ours.

All are closed under slicing a vessel's track: a segment's text depends on its own points only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from anabatic.core.errors import Failure
from anabatic.trajectory.track import Floats, Ints, Track, metres
from anabatic.trajectory.words import (
    COURSE_STEP,
    COURSES,
    END,
    MOVE_EDGES,
    SPEED_EDGES,
    SPEEDS,
    STEP_EDGES,
    TURN_EDGES,
    WordSpec,
)


def encode(track: Track, cuts: Sequence[tuple[int, int]], spec: WordSpec, class_word: str = "") -> list[str]:
    """Return the text of each segment.

    Args:
        track: points of one vessel.
        cuts: first point and end (exclusive) of each segment.
        spec: the words.
        class_word: stands before each POINT_END in the formats `char` and `cell`; the others ignore it.

    Raises:
        Failure: h3 is not installed.
    """
    if not cuts:
        return []
    return _FORMATS[spec.format](track, cuts, spec, class_word)


def cells(track: Track, resolution: int) -> list[int]:
    """Return the H3 cell of each point.

    Raises:
        Failure: h3 is not installed.
    """
    try:
        from h3.api.basic_int import latlng_to_cell
    except ImportError as error:
        raise Failure("h3 is not installed", "pip install 'anabatic[trajectory]'") from error
    points = zip(track.lat.tolist(), track.lon.tolist(), strict=True)
    return [latlng_to_cell(lat, lon, resolution) for lat, lon in points]


def _source(position: Callable[[int], str]) -> Callable[..., list[str]]:
    def encoded(track: Track, cuts: Sequence[tuple[int, int]], spec: WordSpec, class_word: str) -> list[str]:
        ends = _motion_ends(f" {class_word} {END}" if class_word else f" {END}")
        speed = np.searchsorted([2.0, 5.0, 10.0, 15.0], track.sog, side="right")  # NaN sorts last: SPD_HIGH, as there
        sector = np.where(np.isnan(track.cog), 8, (track.cog % 360 + 22.5) // 45 % 8).astype(np.int64)
        motions = (speed * 9 + sector).tolist()
        minutes, seconds = np.divmod(track.time, 60)
        points = [
            f"{_minute(minute)} SECOND_{second} {position(cell)} {ends[motion]}"
            for minute, second, cell, motion in zip(
                minutes.tolist(), seconds.tolist(), cells(track, spec.resolution), motions, strict=True
            )
        ]
        return [" ".join(points[start:end]) for start, end in cuts]

    return encoded


def _motion_ends(tail: str) -> list[str]:
    return [f"{speed} {course}{tail}" for speed in SPEEDS for course in (*COURSES, "COG_UNKNOWN")]


@lru_cache(2**12)
def _day(day: int) -> str:
    year, month, date = str(np.datetime64(day, "D")).split("-")
    return f"YEAR_{int(year)} MONTH_{int(month)} DAY_{int(date)}"


@lru_cache(2**16)
def _minute(minute: int) -> str:
    day, minute = divmod(minute, 1440)
    return f"{_day(day)} HOUR_{minute // 60} MINUTE_{minute % 60}"


def _char(cell: int) -> str:
    return f"{_characters(0, cell >> 40)} {_characters(5, cell >> 20 & 0xFFFFF)} {_characters(10, cell & 0xFFFFF)}"


@lru_cache(2**16)
def _characters(first: int, part: int) -> str:
    return " ".join(f"H3_CHAR_{place}_{digit}" for place, digit in enumerate(f"{part:05x}", first))


def _cell(cell: int) -> str:
    return f"{_cell_head(cell >> 36)} {_digits(5, cell >> 27 & 511)} {_digits(8, cell >> 18 & 511)}"


@lru_cache(2**16)
def _cell_head(part: int) -> str:
    """Resolution, base cell and four digits; they start three bits early, as in the source's code."""
    res, base = part >> 16 & 15, part >> 9 & 127
    digits = " ".join(f"H3_cell_{level}_{part >> 3 * (4 - level) & 7}" for level in (1, 2, 3, 4))
    return f"H3_res_{res} H3_base_{base} {digits}"


@cache
def _digits(first: int, part: int) -> str:
    return " ".join(f"H3_cell_{first + place}_{part >> 3 * (2 - place) & 7}" for place in range(3))


def speed_bins(knots: Floats) -> Ints:
    """Index into `SPEED_EDGES` of each speed; past the end for one that is not available."""
    bins = np.searchsorted(SPEED_EDGES, np.round(knots * 10), side="right") - 1
    return np.where(np.isnan(knots), len(SPEED_EDGES), np.maximum(bins, 0))


def _fine(prefix: str) -> list[str]:
    return [*(f"{prefix}_{edge}" for edge in SPEED_EDGES), f"{prefix}_NONE"]


_STEP_WORDS = [f"DT_{edge}" for edge in STEP_EDGES]
STEP_MIDDLES = [(low + high - 1) // 2 for low, high in pairwise((*STEP_EDGES, STEP_EDGES[-1] + 1))]
"""Seconds that each time-step word stands for."""


def _steps(times: list[int]) -> list[str]:
    """Time-step words: each tells the time since the decoded clock, so that what is rounded does not add up."""
    clock, words = times[0], []
    for time in times[1:]:
        place = bisect_right(STEP_EDGES, time - clock) - 1 if time > clock else 0
        clock += STEP_MIDDLES[place]
        words.append(_STEP_WORDS[place])
    return words


def _compact(track: Track, cuts: Sequence[tuple[int, int]], spec: WordSpec, class_word: str) -> list[str]:
    speeds, places = _fine("SPD"), speed_bins(track.sog).tolist()
    courses = np.where(np.isnan(track.cog), -1, np.round(track.cog / COURSE_STEP) * COURSE_STEP % 360).astype(np.int64)
    motion = [
        f"{speeds[place]} {f'COG_{course}' if course >= 0 else 'COG_NONE'} {END}"
        for place, course in zip(places, courses.tolist(), strict=True)
    ]
    found, times, texts = cells(track, spec.resolution), track.time.tolist(), []
    for start, end in cuts:
        minute, second = divmod(times[start], 60)
        parts = [f"{_minute(minute)} SECOND_{second} {_position(found[start], 0, spec.resolution)} {motion[start]}"]
        steps = _steps(times[start:end])
        for step, index in zip(steps, range(start + 1, end), strict=True):
            moved = _moved(found[index - 1], found[index], spec.resolution)
            parts.append(f"{step} {moved}{motion[index]}")
        texts.append(" ".join(parts))
    return texts


def _position(cell: int, level: int, resolution: int) -> str:
    """Words of the base cell (level 0) and of the digits from `level` on."""
    if resolution == 10 and level > 6:
        return _last(cell >> 15 & 0xFFF, level)
    return _from(cell >> 3 * (15 - resolution), level, resolution)


@cache
def _last(digits: int, level: int) -> str:
    return " ".join(f"H3_{one}_{digits >> 3 * (10 - one) & 7}" for one in range(level, 11))


@lru_cache(2**16)
def _from(digits: int, level: int, resolution: int) -> str:
    base = [f"H3_base_{digits >> 3 * resolution & 127}"] if level == 0 else []
    words = [f"H3_{one}_{digits >> 3 * (resolution - one) & 7}" for one in range(max(level, 1), resolution + 1)]
    return " ".join([*base, *words])


def _moved(before: int, after: int, resolution: int) -> str:
    """What changed: the digits from the first that differs; empty within a cell."""
    differ = before ^ after
    return _position(after, max(0, 15 - (differ.bit_length() - 1) // 3), resolution) + " " if differ else ""


def _motion(track: Track, cuts: Sequence[tuple[int, int]], spec: WordSpec, class_word: str) -> list[str]:
    speeds, places = _fine("SPD"), speed_bins(track.sog).tolist()
    turn = np.round(((np.diff(track.cog) + 180) % 360 - 180) * 10)  # tenths, so that 0.5 is not a little less
    size = np.searchsorted(TURN_EDGES, np.abs(turn), side="right") - 1
    turns = np.where(np.isnan(turn), 0, np.where(turn < 0, -size, size)).tolist()
    minutes = np.maximum(np.diff(track.time), 1) / 60
    moves = (np.searchsorted(MOVE_EDGES, metres(track.lat, track.lon) / minutes, side="right") - 1).tolist()
    parts = [
        f"{_TURNS[turned] if known else 'TURN_NONE'} MOVE_{MOVE_EDGES[moved]}"
        for turned, known, moved in zip(turns, (~np.isnan(turn)).tolist(), moves, strict=True)
    ]
    times, texts = track.time.tolist(), []
    for start, end in cuts:
        words = [f"DT_NONE {speeds[places[start]]} TURN_NONE MOVE_NONE"]
        for step, index in zip(_steps(times[start:end]), range(start + 1, end), strict=True):
            words.append(f"{step} {speeds[places[index]]} {parts[index - 1]}")
        texts.append(" ".join(words))
    return texts


_TURNS = {0: "TURN_0"} | {
    sign * place: f"TURN_{side}{edge}"
    for side, sign in (("P", -1), ("S", 1))
    for place, edge in enumerate(TURN_EDGES[1:], start=1)
}
_FORMATS = {"char": _source(_char), "cell": _source(_cell), "compact": _compact, "motion": _motion}
