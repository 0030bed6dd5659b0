"""Segments from the files that paths name: rows of words, or AIS tables and messages."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from anabatic.config.vessels.tracks import TrackSettings
from anabatic.core.errors import DataError
from anabatic.vessels.io import ais_tables, nmea
from anabatic.vessels.io.bad_rows import BadRowPolicy
from anabatic.vessels.io.track_collection import open_tracks
from anabatic.vessels.words.segments import SegmentSet, iter_segments, make_word_spec
from anabatic.vessels.words.vocabulary import SOURCE_CLASSES, WordSpec
from anabatic.vessels.words.word_rows import read_word_rows

WORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""File names of rows of words."""
AIS_SUFFIXES = (*ais_tables.TABLE_SUFFIXES, *nmea.NMEA_SUFFIXES)
"""File names of AIS files."""


def find_files(paths: Sequence[str | Path], known: tuple[str, ...] = (*WORD_SUFFIXES, *AIS_SUFFIXES)) -> list[Path]:
    """Return the files that paths and globs name: a folder stands for the files in it that can be read, sorted.

    Args:
        paths: files, folders and globs.
        known: ends of the file names that can be read.

    Raises:
        DataError: a path does not exist, is of a kind that is not read, or a folder holds none.
    """
    found: list[Path] = []
    for path in _expand_paths(paths):
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if one.is_file() and one.name.lower().endswith(known))
            if not inside:
                raise DataError(f"{path}: no file that can be read", f"kinds: {', '.join(known)}")
            found += inside
        elif not path.exists():
            raise DataError(f"{path}: there is no such file", "check the path")
        elif not path.name.lower().endswith(known):
            raise DataError(f"{path}: not a kind of file that is read", f"kinds: {', '.join(known)}")
        else:
            found.append(path)
    if not found:
        raise DataError("no file is given", "name AIS tables (.csv, .parquet) or rows of words (.jsonl)")
    return list(dict.fromkeys(found))


def _expand_paths(paths: Sequence[str | Path]) -> Iterator[Path]:
    for one in paths:
        path = Path(one).expanduser()
        matches = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        yield from map(Path, matches) if matches else [path]


def read_segments(
    paths: Sequence[str | Path], reading: TrackSettings | None = None, expect: WordSpec | None = None
) -> SegmentSet:
    """Read segments from rows of words (.jsonl) or from AIS files, not both at once.

    Args:
        paths: files and folders.
        reading: how; default: the settings' defaults.
        expect: words and classes that a model knows: AIS files are turned into these, others are refused.

    Raises:
        DataError: names file and line.
    """
    reading = reading or TrackSettings()
    if expect is not None:
        own = [] if expect.classes == SOURCE_CLASSES else list(expect.classes)
        classes = reading.classes or own
        reading = replace(reading, format=cast(Any, expect.format), resolution=expect.resolution, classes=classes)
    named = find_files(paths)
    rows = [path for path in named if path.name.lower().endswith(WORD_SUFFIXES)]
    bad = BadRowPolicy(reading.on_bad_row == "skip")
    if not rows:
        with open_tracks(named, reading, bad) as tracks:
            spec = make_word_spec(reading, tracks.classes)
            return SegmentSet(list(iter_segments(tracks, reading, spec, bad)), tracks.classes, spec, bad)
    if len(rows) < len(named):
        other = next(path for path in named if path not in rows)
        raise DataError(
            f"{rows[0]} holds words, {other} holds points", "turn the points into words first, or name one kind"
        )
    return read_word_rows(rows, reading, expect, bad)
