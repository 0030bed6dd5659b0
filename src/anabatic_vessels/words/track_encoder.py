"""Encode points as words: the two formats of the source, and the two of this project.

The text of a segment depends on its own points only, so a track can be sliced before or after encoding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from anabatic.core import extras
from anabatic_vessels.io.track import Floats, Ints, Track, measure_steps
from anabatic_vessels.words.vocabulary import (
    COURSE_STEP,
    COURSE_WORDS,
    MOVE_EDGES,
    POINT_END,
    SPEED_EDGES,
    SPEED_WORDS,
    STEP_EDGES,
    TURN_EDGES,
    WordSpec,
)


def encode_track(track: Track, cuts: Sequence[tuple[int, int]], spec: WordSpec, class_word: str = "") -> list[str]:
    """Return the text of each segment.

    Args:
        track: points of one vessel.
        cuts: first point and end (exclusive) of each segment.
        spec: spec of the words.
        class_word: word before each POINT_END in the formats `char` and `cell`; the others ignore it.

    Raises:
        ConfigError: h3 is not installed.
    """
    if not cuts:
        return []
    return _ENCODERS[spec.format](track, cuts, spec, class_word)


def find_cells(track: Track, resolution: int) -> list[int]:
    """Return the H3 cell of each point.

    Raises:
        ConfigError: h3 is not installed.
    """
    latlng_to_cell = extras.import_optional("h3.api.basic_int", "tracks.format").latlng_to_cell
    points = zip(track.lat.tolist(), track.lon.tolist(), strict=True)
    return [latlng_to_cell(lat, lon, resolution) for lat, lon in points]


def _motion_ends(tail: str) -> list[str]:
    return [f"{speed} {course}{tail}" for speed in SPEED_WORDS for course in (*COURSE_WORDS, "COG_UNKNOWN")]


class _TextCache(dict[int, str]):
    """Cache of texts that are built on first use; cleared when it is full."""

    def __init__(self, make: Callable[[int], str]) -> None:
        super().__init__()
        self._make_text = make

    def __missing__(self, key: int) -> str:
        if len(self) >= MAX_CACHED_TEXTS:
            self.clear()
        text = self[key] = self._make_text(key)
        return text


MAX_CACHED_TEXTS = 2**17
"""Maximum texts per cache: about 15 MB."""


def _minute_words(minute: int) -> str:
    day, hour, minute = minute // 1440, minute // 60 % 24, minute % 60
    year, month, date = str(np.datetime64(day, "D")).split("-")
    return f"YEAR_{int(year)} MONTH_{int(month)} DAY_{int(date)} HOUR_{hour} MINUTE_{minute}"


def _character_words(first: int) -> Callable[[int], str]:
    """Return the words of five characters of a cell; `first` is the position of the first."""
    return lambda part: " ".join(f"H3_CHAR_{position}_{digit}" for position, digit in enumerate(f"{part:05x}", first))


def _cell_head_words(part: int) -> str:
    """Return resolution, base cell and four digits; the digits start three bits early, as in the source's code."""
    res, base = part >> 16 & 15, part >> 9 & 127
    digits = " ".join(f"H3_cell_{level}_{part >> 3 * (4 - level) & 7}" for level in (1, 2, 3, 4))
    return f"H3_res_{res} H3_base_{base} {digits}"


def _make_digit_words(first: int) -> Callable[[int], str]:
    return lambda part: " ".join(
        f"H3_cell_{first + position}_{part >> 3 * (2 - position) & 7}" for position in range(3)
    )


_MINUTE_TEXTS = _TextCache(_minute_words)
_CHAR_PARTS = [
    (40, 0xFFFFF, _TextCache(_character_words(0))),
    (20, 0xFFFFF, _TextCache(_character_words(5))),
    (0, 0xFFFFF, _TextCache(_character_words(10))),
]
_CELL_PARTS = [
    (36, 0xFFFFF, _TextCache(_cell_head_words)),
    (27, 511, _TextCache(_make_digit_words(5))),
    (18, 511, _TextCache(_make_digit_words(8))),
]
"""(bit shift, mask, texts) of each part of a cell's index."""


def _make_source_encoder(parts: list[tuple[int, int, _TextCache]]) -> Callable[..., list[str]]:
    def encode_source(track: Track, cuts: Sequence[tuple[int, int]], spec: WordSpec, class_word: str) -> list[str]:
        endings = _motion_ends(f" {class_word} {POINT_END}" if class_word else f" {POINT_END}")
        speed = np.searchsorted(
            [2.0, 5.0, 10.0, 15.0], track.sog, side="right"
        )  # NaN sorts last: SPD_HIGH, as in the source
        sector = np.where(np.isnan(track.cog), 8, (track.cog % 360 + 22.5) // 45 % 8).astype(np.int64)
        minutes, seconds = np.divmod(track.time, 60)
        cells = np.array(find_cells(track, spec.resolution), np.int64)
        keys = [minutes, seconds, *(cells >> shift & mask for shift, mask, _ in parts), speed * 9 + sector]
        (_, _, first), (_, _, second), (_, _, third) = parts
        points = [
            f"{_MINUTE_TEXTS[a]} SECOND_{b} {first[c]} {second[d]} {third[e]} {endings[f]}"
            for a, b, c, d, e, f in zip(*(key.tolist() for key in keys), strict=True)
        ]
        return [" ".join(points[start:end]) for start, end in cuts]

    return encode_source


def speed_bins(knots: Floats) -> Ints:
    """Return the index of each speed in `SPEED_EDGES`; its length for a missing speed."""
    bins = np.searchsorted(SPEED_EDGES, np.round(knots * 10), side="right") - 1
    return np.where(np.isnan(knots), len(SPEED_EDGES), np.maximum(bins, 0))


def _fine_speed_words(prefix: str) -> list[str]:
    return [*(f"{prefix}_{edge}" for edge in SPEED_EDGES), f"{prefix}_NONE"]


_STEP_WORDS = [f"DT_{edge}" for edge in STEP_EDGES]
STEP_MIDDLES = [(low + high - 1) // 2 for low, high in pairwise((*STEP_EDGES, STEP_EDGES[-1] + 1))]
"""Seconds of each time-step word."""


def _time_step_words(times: list[int]) -> list[str]:
    """Return time-step words relative to the decoded clock, so that rounding errors do not accumulate."""
    clock, words = times[0], []
    for time in times[1:]:
        index = bisect_right(STEP_EDGES, time - clock) - 1 if time > clock else 0
        clock += STEP_MIDDLES[index]
        words.append(_STEP_WORDS[index])
    return words


def _encode_compact(track: Track, cuts: Sequence[tuple[int, int]], spec: WordSpec, class_word: str) -> list[str]:
    courses = np.where(np.isnan(track.cog), _NUM_COURSES, np.round(track.cog / COURSE_STEP) % _NUM_COURSES).astype(
        np.int64
    )
    table = _motion_table()
    motion = [table[index] for index in (speed_bins(track.sog) * (_NUM_COURSES + 1) + courses).tolist()]
    cells, times, texts = find_cells(track, spec.resolution), track.time.tolist(), []
    digit_words = _changed_digits(np.array(cells, np.int64), spec.resolution)
    for start, end in cuts:
        minute, second = divmod(times[start], 60)
        head = (
            f"{_MINUTE_TEXTS[minute]} SECOND_{second} "
            f"{_cell_words_from(cells[start], 0, spec.resolution)}{motion[start]}"
        )
        rest = zip(
            _time_step_words(times[start:end]), digit_words[start : end - 1], motion[start + 1 : end], strict=True
        )
        texts.append(" ".join([head, *(f"{step} {digits}{tail}" for step, digits, tail in rest)]))
    return texts


@cache
def _motion_table() -> list[str]:
    """Return the words of speed, course and point end, at index `speed * (_NUM_COURSES + 1) + course`."""
    courses = [*(f"COG_{degrees}" for degrees in range(0, 360, COURSE_STEP)), "COG_NONE"]
    return [f"{speed} {course} {POINT_END}" for speed in _fine_speed_words("SPD") for course in courses]


_NUM_COURSES = 360 // COURSE_STEP


def _changed_digits(cells: Ints, resolution: int) -> list[str]:
    """Return the digit words from the first changed digit on, with a trailing space; empty within a cell."""
    differences = cells[1:] ^ cells[:-1]
    bits = np.frexp(differences.astype(np.float64))[1].astype(np.int64)  # a difference has at most 52 bits: exact
    levels = np.where(differences == 0, -1, np.maximum(0, 15 - (bits - 1) // 3))
    cache_keys = np.where(
        (levels > resolution - 4) & (levels > 0), levels << 12 | cells[1:] >> 3 * (15 - resolution) & 0xFFF, 0
    )
    last_digits = _last_digit_words(resolution)
    return [
        last_digits[key] if key else "" if level < 0 else _cell_words_from(cell, level, resolution)
        for key, level, cell in zip(cache_keys.tolist(), levels.tolist(), cells[1:].tolist(), strict=True)
    ]


@cache
def _last_digit_words(resolution: int) -> _TextCache:
    """Return the words of at most the last four digits, by key `level << 12 | digits`."""
    return _TextCache(lambda key: _digit_words(key & 0xFFF, key >> 12, resolution))


def _digit_words(digits: int, level: int, resolution: int) -> str:
    levels = range(max(level, 1), resolution + 1)
    return "".join(f"H3_{position}_{digits >> 3 * (resolution - position) & 7} " for position in levels)


@lru_cache(2**16)
def _cell_words_from(cell: int, level: int, resolution: int) -> str:
    """Return the words of the base cell (level 0) and of the digits from `level` on, each with a trailing space."""
    base = f"H3_base_{cell >> 45 & 127} " if level == 0 else ""
    return base + _digit_words(cell >> 3 * (15 - resolution), level, resolution)


def _encode_motion(track: Track, cuts: Sequence[tuple[int, int]], spec: WordSpec, class_word: str) -> list[str]:
    speeds, speed_indices = _fine_speed_words("SPD"), speed_bins(track.sog).tolist()
    turn = np.round(((np.diff(track.cog) + 180) % 360 - 180) * 10)  # tenths, so that 0.5 is exact
    magnitudes = np.searchsorted(TURN_EDGES, np.abs(turn), side="right") - 1
    turns = np.where(np.isnan(turn), 0, np.where(turn < 0, -magnitudes, magnitudes)).tolist()
    minutes = np.maximum(np.diff(track.time), 1) / 60
    moves = (np.searchsorted(MOVE_EDGES, measure_steps(track.lat, track.lon) / minutes, side="right") - 1).tolist()
    parts = [
        f"{_TURN_WORDS[turn_bin] if is_known else 'TURN_NONE'} MOVE_{MOVE_EDGES[move_bin]}"
        for turn_bin, is_known, move_bin in zip(turns, (~np.isnan(turn)).tolist(), moves, strict=True)
    ]
    times, texts = track.time.tolist(), []
    for start, end in cuts:
        words = [f"DT_NONE {speeds[speed_indices[start]]} TURN_NONE MOVE_NONE"]
        for step, index in zip(_time_step_words(times[start:end]), range(start + 1, end), strict=True):
            words.append(f"{step} {speeds[speed_indices[index]]} {parts[index - 1]}")
        texts.append(" ".join(words))
    return texts


_TURN_WORDS = {0: "TURN_0"} | {
    sign * index: f"TURN_{side}{edge}"
    for side, sign in (("P", -1), ("S", 1))
    for index, edge in enumerate(TURN_EDGES[1:], start=1)
}
_ENCODERS = {
    "char": _make_source_encoder(_CHAR_PARTS),
    "cell": _make_source_encoder(_CELL_PARTS),
    "compact": _encode_compact,
    "motion": _encode_motion,
}
