"""Read segments from files: rows of words, or AIS tables and messages."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from anabatic.core.errors import DataError
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io import ais_json, ais_tables, nmea
from anabatic_vessels.io.track import BadRowPolicy
from anabatic_vessels.io.track_collection import open_tracks
from anabatic_vessels.words.segments import SegmentSet, iter_segments, make_word_spec
from anabatic_vessels.words.vocabulary import SOURCE_CLASSES, WordSpec
from anabatic_vessels.words.word_rows import read_word_rows

WORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Suffixes of rows of words."""
AIS_SUFFIXES = (*ais_tables.TABLE_SUFFIXES, *nmea.NMEA_SUFFIXES, *ais_json.JSON_SUFFIXES)
"""Suffixes of AIS files; JSON lines hold messages or words."""


def holds_words(path: Path) -> bool:
    """Return whether a file holds rows of words or predictions, not AIS data."""
    return path.name.lower().endswith(WORD_SUFFIXES) and not ais_json.holds_messages(path)


def find_files(paths: Sequence[str | Path], suffixes: tuple[str, ...] = (*WORD_SUFFIXES, *AIS_SUFFIXES)) -> list[Path]:
    """Expand paths and globs to files; a folder is expanded to its readable files, sorted.

    Args:
        paths: files, folders and globs.
        suffixes: suffixes of readable files.

    Raises:
        DataError: a path does not exist, is not readable, or a folder has no readable file.
    """
    files: list[Path] = []
    for path in _expand_paths(paths):
        if path.is_dir():
            matches = sorted(
                file for file in path.rglob("*") if file.is_file() and file.name.lower().endswith(suffixes)
            )
            if not matches:
                raise DataError(f"{path}: no file that can be read", f"kinds: {', '.join(suffixes)}")
            files += matches
        elif not path.exists():
            raise DataError(f"{path}: there is no such file", "check the path")
        elif not path.name.lower().endswith(suffixes):
            raise DataError(f"{path}: not a kind of file that is read", f"kinds: {', '.join(suffixes)}")
        else:
            files.append(path)
    if not files:
        raise DataError("no file is given", "name AIS tables (.csv, .parquet) or rows of words (.jsonl)")
    return list(dict.fromkeys(files))


def _expand_paths(paths: Sequence[str | Path]) -> Iterator[Path]:
    for pattern in paths:
        path = Path(pattern).expanduser()
        matches = [] if path.exists() else sorted(glob.glob(str(path), recursive=True))
        yield from map(Path, matches) if matches else [path]


def read_segments(
    paths: Sequence[str | Path], settings: TrackSettings | None = None, expected_spec: WordSpec | None = None
) -> SegmentSet:
    """Read segments from rows of words (.jsonl) or from AIS files, not both at once.

    Args:
        paths: files and folders.
        settings: track settings; default: their defaults.
        expected_spec: words and classes of a model: AIS files are encoded as these, other rows are rejected.

    Raises:
        DataError: names file and line.
    """
    settings = settings or TrackSettings()
    if expected_spec is not None:
        default_classes = [] if expected_spec.classes == SOURCE_CLASSES else list(expected_spec.classes)
        classes = settings.classes or default_classes
        settings = replace(
            settings, format=cast(Any, expected_spec.format), resolution=expected_spec.resolution, classes=classes
        )
    files = find_files(paths)
    rows = [path for path in files if holds_words(path)]
    bad_rows = BadRowPolicy(settings.on_bad_row == "skip")
    if not rows:
        with open_tracks(files, settings, bad_rows) as tracks:
            spec = make_word_spec(settings, tracks.classes)
            return SegmentSet(list(iter_segments(tracks, settings, spec, bad_rows)), tracks.classes, spec, bad_rows)
    if len(rows) < len(files):
        other = next(path for path in files if path not in rows)
        raise DataError(
            f"{rows[0]} holds words, {other} holds points", "turn the points into words first, or name one kind"
        )
    return read_word_rows(rows, settings, expected_spec, bad_rows)
