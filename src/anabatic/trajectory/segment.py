"""Segments: rows of words, from JSONL files or straight from AIS tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.trajectory.encode import encode
from anabatic.trajectory.track import Track
from anabatic.trajectory.words import H3_METHOD, SOURCE_CLASSES, UNKNOWN_CLASS, WITH_CLASS, WordSpec, strip_class_words


@dataclass(frozen=True)
class Segment:
    """A run of points of one vessel, as words.

    Attributes:
        text: the words, one space between them.
        label: position in `Segments.classes`; None: not known.
        vessel: group id: MMSI, or the stem of `source_file`.
        source_file: file name.
        start: unix seconds of the first point; None: the row does not say.
        points: how many points it has.
        features: kinematic numbers in the order of `features.NAMES`; None: the row has none.
        line: line of the row in the JSONL file, or of the vessel's first point in the table.
    """

    text: str
    label: int | None
    vessel: str
    source_file: str
    start: int | None
    points: int
    features: tuple[float, ...] | None
    line: int


@dataclass
class Reading:
    """How to read. Commands fill it from their settings.

    Attributes:
        spec: words that tables are turned into; JSONL rows that name another spec are refused.
        points: points of a segment.
        min_points: shortest tail that is kept.
        gap_minutes: a longer silence ends a segment; 0: never.
        keep_class_word: leave class words in the text.
        classes: names of the classes; None: the source's 14, or what the data names.
        on_bad_row: `fail` or `skip`.
    """

    spec: WordSpec | None = None
    points: int = 30
    min_points: int = 10
    gap_minutes: float = 60.0
    keep_class_word: bool = False
    classes: tuple[str, ...] | None = None
    on_bad_row: str = "fail"


@dataclass
class Segments:
    """What was read: iterate over it, or take `rows`."""

    rows: list[Segment]
    classes: tuple[str, ...]
    spec: WordSpec | None
    counts: Counter[str] = field(default_factory=Counter)
    """`class words stripped`, `rows without text`, `rows without a label`, ..."""

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def read_segments(paths: Sequence[str | Path], reading: Reading | None = None) -> Segments:
    """Read segments from JSONL rows and AIS tables (CSV, also compressed).

    Raises:
        DataError: names file and line.
    """
    reading = reading or Reading()
    raw: list[tuple[Segment, str]] = []
    counts: Counter[str] = Counter()
    for path in (Path(one) for one in paths):
        reader = _jsonl if path.name.endswith((".jsonl", ".jsonl.gz")) else _table
        raw.extend(reader(path, reading, counts))
    return _labelled(raw, reading, counts)


def _jsonl(path: Path, reading: Reading, counts: Counter[str]) -> Iterator[tuple[Segment, str]]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}: line {number}: broken JSON: {error}") from error
            yield _segment(row, f"{path}: line {number}", number, reading, counts)


def _segment(
    row: dict[str, Any], place: str, number: int, reading: Reading, counts: Counter[str]
) -> tuple[Segment, str]:
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{place}: no text", 'a row looks like {"text": "YEAR_2021 ...", "label": 0}')
    if not reading.keep_class_word:
        text, stripped = strip_class_words(text)
        counts["class words stripped"] += stripped
    source = str(row.get("source_file", ""))
    points = int(row.get("segment_length") or text.count("POINT_END"))
    features = tuple(row["features"]) if row.get("features") else None
    vessel = str(row.get("vessel") or Path(source).stem or f"line {number}")
    label = row.get("label")
    name = str(row.get("class", ""))
    made = Segment(text, label, vessel, source, row.get("start"), points, features, number)
    return made, name


def _table(path: Path, reading: Reading, counts: Counter[str]) -> Iterator[tuple[Segment, str]]:
    from anabatic.trajectory.tables import tracks

    spec = reading.spec or WordSpec()
    for track in tracks([path]):
        for segment in segments_of(track, reading, spec):
            yield segment, track.label


def segments_of(track: Track, reading: Reading, spec: WordSpec) -> Iterator[Segment]:
    """Cut one vessel's track into segments and write their words."""
    cuts = cut(track, reading)
    word = track.label or UNKNOWN_CLASS
    if word.replace(".", "", 1).isdigit():
        word = dict(enumerate(spec.classes)).get(int(float(word)), UNKNOWN_CLASS)
    texts = encode(track, cuts, spec, word if reading.keep_class_word and spec.format in WITH_CLASS else "")
    for (start, end), text in zip(cuts, texts, strict=True):
        when = int(track.time[start])
        yield Segment(text, None, track.vessel, track.source_file, when, end - start, None, track.line)


def cut(track: Track, reading: Reading) -> list[tuple[int, int]]:
    """Return `(first, end)` of each segment: runs of `points`, broken at gaps, tails of `min_points` kept."""
    limit = reading.gap_minutes * 60
    breaks = np.flatnonzero(np.diff(track.time) > limit) + 1 if limit else np.zeros(0, np.int64)
    edges = [0, *breaks.tolist(), len(track)]
    found = []
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        for start in range(first, last, reading.points):
            end = min(start + reading.points, last)
            if end - start >= reading.min_points:
                found.append((start, end))
    return found


def _labelled(raw: list[tuple[Segment, str]], reading: Reading, counts: Counter[str]) -> Segments:
    """Turn class names and ids into positions in one list of classes."""
    names = {name for _, name in raw if name and not name.replace(".", "", 1).isdigit()}
    classes = reading.classes
    if classes is None:
        classes = tuple(sorted(names)) if names - set(SOURCE_CLASSES) else SOURCE_CLASSES
    place = {name: index for index, name in enumerate(classes)}
    rows = []
    for segment, name in raw:
        label = segment.label
        if name in place:
            label = place[name]
        elif name:
            label = int(float(name))
        if label is None:
            counts["rows without a label"] += 1
        elif not 0 <= label < len(classes):
            raise DataError(
                f"{segment.source_file}: line {segment.line}: label {label}, but there are {len(classes)} classes"
            )
        rows.append(Segment(**{**segment.__dict__, "label": label}))
    return Segments(rows, classes, reading.spec, counts)


def as_row(segment: Segment, spec: WordSpec, source_keys_only: bool = False) -> dict[str, Any]:
    """Return the JSONL row of a segment: the source's keys, then ours."""
    row: dict[str, Any] = {
        "text": segment.text,
        "label": segment.label,
        "segment_length": segment.points,
        "h3_method": H3_METHOD[spec.format],
        "source_file": segment.source_file,
    }
    if not source_keys_only:
        name = spec.classes[segment.label] if segment.label is not None else None
        row |= {"class": name, "vessel": segment.vessel, "start": segment.start, "words": spec.name}
        row |= {"features": segment.features} if segment.features is not None else {}
    return row
