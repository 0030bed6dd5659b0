"""Segments: runs of points of one vessel as words, from rows of words and straight from AIS files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anabatic.config.vessels.tracks import TrackSettings
from anabatic.vessels.io.bad_rows import BadRowPolicy
from anabatic.vessels.io.track import Track
from anabatic.vessels.io.track_collection import TrackCollection
from anabatic.vessels.words.kinematic_features import compute_features
from anabatic.vessels.words.track_encoder import encode_track
from anabatic.vessels.words.vocabulary import FORMATS_WITH_CLASS, H3_METHOD, WordSpec, make_class_word


@dataclass(frozen=True)
class Segment:
    """A run of points of one vessel, as words.

    Attributes:
        text: the words, one space between them.
        label: position in `SegmentSet.classes`; None: not known.
        vessel: group id: the MMSI, or the stem of `source_file`.
        source_file: file name.
        start: unix seconds of the first point; None: the row does not say.
        points: how many points it has.
        features: kinematic numbers in the order of `features.NAMES`; None: the row has none.
        line: line of the row of words, or of the track's first point in its table.
        place: mean latitude and longitude of its points; None: the row does not say.
        window: points that its track was cut to, `points` or more; 0: the row does not say.
    """

    text: str
    label: int | None
    vessel: str
    source_file: str
    start: int | None
    points: int
    features: tuple[float, ...] | None
    line: int
    place: tuple[float, float] | None = None
    window: int = 0

    @property
    def row_description(self) -> str:
        """Which row it is, for messages: rows of words do not keep the name of the file that they stood in."""
        return f"vessel {self.vessel} (line {self.line} of its file)"


@dataclass
class SegmentSet:
    """What was read.

    Attributes:
        rows: the segments in the order of the files.
        classes: names; the position is the label.
        spec: the words that all rows are made of.
        bad_rows: what was left out, changed or skipped: `bad_rows.counts`.
    """

    rows: list[Segment]
    classes: tuple[str, ...]
    spec: WordSpec
    bad_rows: BadRowPolicy = field(default_factory=BadRowPolicy)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def window_lengths(self) -> tuple[int, ...]:
        """Lengths that the tracks were cut to, in points; empty: the rows do not say."""
        return tuple(sorted({row.window for row in self.rows} - {0}))


def make_word_spec(reading: TrackSettings, classes: tuple[str, ...]) -> WordSpec:
    """Return the words that the settings ask for."""
    return WordSpec(reading.format, reading.resolution, classes=classes)


SEGMENTS_PER_BLOCK = 512
"""Segments whose kinematic numbers are computed together."""


def iter_segments(
    tracks: TrackCollection, reading: TrackSettings, spec: WordSpec, bad: BadRowPolicy
) -> Iterator[Segment]:
    """Cut tracks and write their words and numbers, a block of segments at a time."""
    held: list[Segment] = []
    parts: list[Track] = []
    positions = {name: index for index, name in enumerate(tracks.classes)}
    for track in tracks:
        cuts = cut_track(track, reading, bad)
        bad.counts["segments"] += len(cuts)
        word = make_class_word(track.label) if reading.keep_class_word and spec.format in FORMATS_WITH_CLASS else ""
        label = positions.get(track.label)
        borders = [(start, end) for start, end, _ in cuts]
        for (start, end, window), text in zip(cuts, encode_track(track, borders, spec, word), strict=True):
            place = (round(float(track.lat[start:end].mean()), 4), round(float(track.lon[start:end].mean()), 4))
            when = int(track.time[start])
            own = (text, label, track.vessel, track.source_file, when, end - start, None, track.line, place, window)
            held.append(Segment(*own))
            if reading.features:
                parts.append(track.slice_points(start, end))
        if len(held) >= SEGMENTS_PER_BLOCK:
            yield from _add_features(held, parts)
            held, parts = [], []
    yield from _add_features(held, parts)


def _add_features(held: list[Segment], parts: list[Track]) -> Iterator[Segment]:
    if not parts:
        yield from held
        return
    for segment, numbers in zip(held, compute_features(parts).tolist(), strict=True):
        yield replace(segment, features=tuple(numbers))


def cut_track(track: Track, reading: TrackSettings, bad: BadRowPolicy) -> list[tuple[int, int, int]]:
    """Return `(first, end, window)` of each segment: runs of `window` points, broken at gaps, long rests kept.

    Of several windows the longest comes first; a run that two of them cut alike is taken once. What is left out is
    counted for the longest.
    """
    limit = reading.gap_minutes * 60
    breaks = (np.flatnonzero(np.diff(track.time) > limit) + 1).tolist() if limit else []
    bad.counts["gaps"] += len(breaks)
    edges = [0, *breaks, len(track)]
    found: dict[tuple[int, int], int] = {}
    for number, window in enumerate(reading.window_lengths):
        for start, end in _split_runs(edges, window):
            if end - start < reading.min_points:
                bad.counts["points in rests that are too short"] += (end - start) * (number == 0)
            elif reading.max_still < 1 and np.mean(track.sog[start:end] < 0.5) > reading.max_still:
                bad.counts["segments that lie still"] += number == 0
            else:
                found.setdefault((start, end), window)
    return [(start, end, window) for (start, end), window in found.items()]


def _split_runs(edges: list[int], window: int) -> Iterator[tuple[int, int]]:
    for first, last in itertools.pairwise(edges):
        for start in range(first, last, window):
            yield start, min(start + window, last)


def as_row(segment: Segment, spec: WordSpec, source_keys_only: bool = False) -> dict[str, Any]:
    """Return the JSONL row of a segment: the source's keys, then ours."""
    row: dict[str, Any] = {
        "text": segment.text,
        "label": segment.label,
        "segment_length": segment.points,
        "h3_method": H3_METHOD[spec.format],
        "source_file": segment.source_file,
    }
    if source_keys_only:
        return row
    name = spec.classes[segment.label] if segment.label is not None else None
    row |= {"class": name, "vessel": segment.vessel, "start": segment.start, "words": spec.spec_name}
    if segment.window:
        row["window"] = segment.window
    if segment.place is not None:
        row["place"] = list(segment.place)
    if segment.features is not None:
        row["features"] = json.loads(_format_numbers(segment.features))
    return row


def as_line(segment: Segment, spec: WordSpec, source_keys_only: bool = False) -> str:
    """Return the row as a line of JSON, without a line end: `as_row` in a third of the time."""
    line = json.dumps(as_row(replace(segment, features=None), spec, source_keys_only))
    if segment.features is None or source_keys_only:
        return line
    return f'{line[:-1]}, "features": {_format_numbers(segment.features)}}}'


def _format_numbers(numbers: tuple[float, ...]) -> str:
    """Five digits of each; null for what is not known."""
    return f"[{', '.join(['%.5g'] * len(numbers)) % numbers}]".replace("nan", "null")
