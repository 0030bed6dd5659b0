"""Do the files name more than one class? Looked at before a training is set up: no further than to the second class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from anabatic.config.vessels.tracks import TrackSettings
from anabatic.core.errors import ConfigError
from anabatic.vessels.io import ais_tables, class_labels, nmea
from anabatic.vessels.io.bad_rows import BadRowPolicy
from anabatic.vessels.io.point_conversion import PointConverter
from anabatic.vessels.words.segment_reader import WORD_SUFFIXES, find_files
from anabatic.vessels.words.word_rows import class_of, read_objects

_MAX_ROWS = 500_000
"""Rows that are read; of longer files nothing is said where all these are of one class."""


def require_two_classes(paths: Sequence[str | Path], reading: TrackSettings) -> None:
    """Refuse files whose rows are all of one class.

    Raises:
        ConfigError: they are.
        DataError: a file cannot be read.
    """
    if reading.classes:
        return
    texts: dict[str, str] = {}
    rows = 0
    for path in find_files(paths):
        for found, count in _count_classes(path, reading):
            texts |= found
            rows += count
            if rows > _MAX_ROWS or texts and not _has_one_class(texts, reading):
                return
    if texts:
        (name, *_), _ = class_labels.resolve_classes(texts, reading, BadRowPolicy(should_skip=True))
        raise ConfigError(
            f"one class is no choice: all rows are of {name}", "give rows of two classes or more, whose names differ"
        )


def _has_one_class(texts: dict[str, str], reading: TrackSettings) -> bool:
    return len(class_labels.resolve_classes(texts, reading, BadRowPolicy(should_skip=True))[0]) == 1


def _count_classes(path: Path, reading: TrackSettings) -> Iterator[tuple[dict[str, str], int]]:
    """Yield what names classes, as `class_labels.resolve_classes` takes it, and of how many rows; nothing of NMEA
    messages, which name types anywhere."""
    bad = BadRowPolicy(should_skip=True)
    if path.name.lower().endswith(WORD_SUFFIXES):
        for number, row in read_objects(path, bad):
            name = class_of(row)
            yield ({name: f"{path}: line {number}"} if name else {}), (_MAX_ROWS + 1 if name is None else 1)
    elif nmea.is_nmea_file(path):
        yield {}, _MAX_ROWS + 1
    else:
        converter = PointConverter(reading, bad)
        for points in converter.convert_batches(path, ais_tables.read_table(path, dict(reading.columns), bad)):
            yield dict(converter.label_locations), len(points)
