"""Check vessel files before torch is imported: whether they exist and name more than one class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from anabatic.core.errors import ConfigError, UserError
from anabatic.recipes.prechecks.data_files import list_sources
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.config.train import WordsJob
from anabatic_vessels.io import ais_json, ais_tables, class_labels, nmea
from anabatic_vessels.io.point_conversion import PointConverter
from anabatic_vessels.io.track import BadRowPolicy
from anabatic_vessels.words import segment_reader
from anabatic_vessels.words.segment_reader import find_files, holds_words
from anabatic_vessels.words.word_rows import class_of, read_objects


def check_vessel_files(job: Any, is_stage_output: Callable[[str], bool]) -> Iterator[UserError]:
    """Yield the errors of the files that a `classify` job reads."""
    for name in list_sources(job):
        if is_stage_output(name):
            continue
        try:
            segment_reader.find_files([name])
        except UserError as error:
            yield error
    trains = isinstance(job, WordsJob) and not job.model.path
    if trains and not any(map(is_stage_output, job.data.train)):
        try:
            require_two_classes(job.data.train, job.tracks)
        except UserError as error:
            yield error


_MAX_ROWS = 500_000
"""Maximum rows to read; longer files with one class in these rows pass the check."""


def require_two_classes(paths: Sequence[str | Path], settings: TrackSettings) -> None:
    """Check that the rows have more than one class.

    Raises:
        ConfigError: all rows are of one class.
        DataError: a file cannot be read.
    """
    if settings.classes:
        return
    texts: dict[str, str] = {}
    num_rows = 0
    for path in find_files(paths):
        for class_texts, count in _count_classes(path, settings):
            texts |= class_texts
            num_rows += count
            if num_rows > _MAX_ROWS or texts and not _has_one_class(texts, settings):
                return
    if texts:
        (name, *_), _ = class_labels.resolve_classes(texts, settings, BadRowPolicy(should_skip=True))
        raise ConfigError(
            f"a classifier needs two classes: all rows are of {name}",
            "give rows of two classes or more, whose names differ",
        )


def _has_one_class(texts: dict[str, str], settings: TrackSettings) -> bool:
    return len(class_labels.resolve_classes(texts, settings, BadRowPolicy(should_skip=True))[0]) == 1


def _count_classes(path: Path, settings: TrackSettings) -> Iterator[tuple[dict[str, str], int]]:
    """Yield class texts for `class_labels.resolve_classes` with their number of rows; none for messages, whose
    types can occur anywhere."""
    bad_rows = BadRowPolicy(should_skip=True)
    if holds_words(path):
        for line_number, row in read_objects(path, bad_rows):
            name = class_of(row)
            yield ({name: f"{path}: line {line_number}"} if name else {}), (_MAX_ROWS + 1 if name is None else 1)
    elif nmea.is_nmea_file(path) or ais_json.is_json_file(path):
        yield {}, _MAX_ROWS + 1
    else:
        converter = PointConverter(settings, bad_rows)
        for points in converter.convert_batches(path, ais_tables.read_table(path, dict(settings.columns), bad_rows)):
            yield dict(converter.label_locations), len(points)
