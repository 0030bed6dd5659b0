"""Segments: runs of points of one vessel as words, from rows of words or directly from AIS files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io.track import BadRowPolicy, Track
from anabatic_vessels.io.track_collection import TrackCollection
from anabatic_vessels.words.kinematic_features import compute_features
from anabatic_vessels.words.track_encoder import encode_track
from anabatic_vessels.words.vocabulary import FORMATS_WITH_CLASS, H3_METHOD, WordSpec, make_class_word


@dataclass(frozen=True)
class Segment:
    """A run of points of one vessel, as words.

    Attributes:
        text: the words, separated by single spaces.
        label: index in `SegmentSet.classes`; None: unknown.
        vessel: group id: the MMSI, or the stem of `source_file`.
        source_file: file name.
        start: unix seconds of the first point; None: unknown.
        points: number of points.
        features: kinematic features in the order of `FEATURE_NAMES`; None: the row has none.
        line: line of the row of words, or of the track's first point in its table.
        place: mean latitude and longitude of its points; None: unknown.
        window: length in points to which its track was cut, at least `points`; 0: unknown.
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
        """Description of the row for messages: rows of words do not store the name of their own file."""
        return f"vessel {self.vessel} (line {self.line} of its file)"


@dataclass
class SegmentSet:
    """The segments of some files.

    Attributes:
        rows: the segments in the order of the files.
        classes: names; the index is the label.
        spec: word spec of all rows.
        bad_rows: counts of skipped and changed rows.
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
        """Lengths to which the tracks were cut, in points; empty: unknown."""
        return tuple(sorted({row.window for row in self.rows} - {0}))


def make_word_spec(settings: TrackSettings, classes: tuple[str, ...]) -> WordSpec:
    """Return the word spec of the settings."""
    return WordSpec(settings.format, settings.resolution, classes=classes)


SEGMENTS_PER_BLOCK = 512
"""Segments whose kinematic features are computed together."""


def iter_segments(
    tracks: TrackCollection, settings: TrackSettings, spec: WordSpec, bad_rows: BadRowPolicy
) -> Iterator[Segment]:
    """Cut tracks into segments and compute their words and features, block by block."""
    segments: list[Segment] = []
    segment_tracks: list[Track] = []
    positions = {name: index for index, name in enumerate(tracks.classes)}
    for track in tracks:
        cuts = cut_track(track, settings, bad_rows)
        bad_rows.counts["segments"] += len(cuts)
        word = make_class_word(track.label) if settings.keep_class_word and spec.format in FORMATS_WITH_CLASS else ""
        label = positions.get(track.label)
        bounds = [(start, end) for start, end, _ in cuts]
        for (start, end, window), text in zip(cuts, encode_track(track, bounds, spec, word), strict=True):
            position = (round(float(track.lat[start:end].mean()), 4), round(float(track.lon[start:end].mean()), 4))
            start_time = int(track.time[start])
            fields = (
                text,
                label,
                track.vessel,
                track.source_file,
                start_time,
                end - start,
                None,
                track.line,
                position,
                window,
            )
            segments.append(Segment(*fields))
            if settings.features:
                segment_tracks.append(track.slice_points(start, end))
        if len(segments) >= SEGMENTS_PER_BLOCK:
            yield from _add_features(segments, segment_tracks)
            segments, segment_tracks = [], []
    yield from _add_features(segments, segment_tracks)


def _add_features(segments: list[Segment], tracks: list[Track]) -> Iterator[Segment]:
    if not tracks:
        yield from segments
        return
    for segment, features in zip(segments, compute_features(tracks).tolist(), strict=True):
        yield replace(segment, features=tuple(features))


def cut_track(track: Track, settings: TrackSettings, bad_rows: BadRowPolicy) -> list[tuple[int, int, int]]:
    """Return `(first, end, window)` of each segment: runs of `window` points, split at gaps, long remainders kept.

    Of several windows the longest comes first; identical runs of two windows are returned once. Segments left out are
    counted for the longest window.
    """
    limit = settings.gap_minutes * 60
    breaks = (np.flatnonzero(np.diff(track.time) > limit) + 1).tolist() if limit else []
    bad_rows.counts["gaps"] += len(breaks)
    edges = [0, *breaks, len(track)]
    window_by_run: dict[tuple[int, int], int] = {}
    for index, window in enumerate(settings.window_lengths):
        for start, end in _split_runs(edges, window):
            if end - start < settings.min_points:
                bad_rows.counts["points in rests that are too short"] += (end - start) * (index == 0)
            elif settings.max_still < 1 and np.mean(track.sog[start:end] < 0.5) > settings.max_still:
                bad_rows.counts["segments that lie still"] += index == 0
            else:
                window_by_run.setdefault((start, end), window)
    return [(start, end, window) for (start, end), window in window_by_run.items()]


def _split_runs(edges: list[int], window: int) -> Iterator[tuple[int, int]]:
    for first, last in itertools.pairwise(edges):
        for start in range(first, last, window):
            yield start, min(start + window, last)


def as_row(segment: Segment, spec: WordSpec, source_keys_only: bool = False) -> dict[str, Any]:
    """Return the JSONL row of a segment: the source's keys, then the extra keys."""
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
    """Return the row as a line of JSON without a newline, three times as fast as via `as_row`."""
    line = json.dumps(as_row(replace(segment, features=None), spec, source_keys_only))
    if segment.features is None or source_keys_only:
        return line
    return f'{line[:-1]}, "features": {_format_numbers(segment.features)}}}'


def _format_numbers(numbers: tuple[float, ...]) -> str:
    """Return a JSON list with five digits per number; null for NaN."""
    return f"[{', '.join(['%.5g'] * len(numbers)) % numbers}]".replace("nan", "null")
