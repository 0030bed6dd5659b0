"""Do the files name more than one class? Looked at before a training is set up: no further than to the second class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from anabatic.config.reading import Reading
from anabatic.core.errors import ConfigError
from anabatic.trajectory import labels, nmea, tables
from anabatic.trajectory.points import Converter
from anabatic.trajectory.read import WORDS, files
from anabatic.trajectory.rows import BadRows
from anabatic.trajectory.word_rows import class_of, objects

_MOST = 500_000
"""Rows that are read; of longer files nothing is said where all these are of one class."""


def require_choice(paths: Sequence[str | Path], reading: Reading) -> None:
    """Refuse files whose rows are all of one class.

    Raises:
        ConfigError: they are.
        DataError: a file cannot be read.
    """
    if reading.classes:
        return
    texts: dict[str, str] = {}
    rows = 0
    for path in files(paths):
        for found, count in _classes(path, reading):
            texts |= found
            rows += count
            if rows > _MOST or texts and not _is_one(texts, reading):
                return
    if texts:
        (name, *_), _ = labels.resolve(texts, reading, BadRows(skip=True))
        raise ConfigError(
            f"one class is no choice: all rows are of {name}", "give rows of two classes or more, whose names differ"
        )


def _is_one(texts: dict[str, str], reading: Reading) -> bool:
    return len(labels.resolve(texts, reading, BadRows(skip=True))[0]) == 1


def _classes(path: Path, reading: Reading) -> Iterator[tuple[dict[str, str], int]]:
    """Yield what names classes, as `labels.resolve` takes it, and of how many rows; nothing of NMEA messages, which
    name types anywhere."""
    bad = BadRows(skip=True)
    if path.name.lower().endswith(WORDS):
        for number, row in objects(path, bad):
            name = class_of(row)
            yield ({name: f"{path}: line {number}"} if name else {}), (_MOST + 1 if name is None else 1)
    elif nmea.is_nmea(path):
        yield {}, _MOST + 1
    else:
        converter = Converter(reading, bad)
        for points in converter.points(path, tables.read(path, dict(reading.columns), bad)):
            yield dict(converter.label_places), len(points)
