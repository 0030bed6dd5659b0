"""Checks of vessel files before torch is imported: whether they exist and name more than one class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from anabatic.config.vessels.train import WordsJob
from anabatic.core.errors import UserError
from anabatic.recipes.prechecks.data_files import list_sources
from anabatic.vessels.words import class_count, segment_reader


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
            class_count.require_two_classes(job.data.train, job.tracks)
        except UserError as error:
            yield error
