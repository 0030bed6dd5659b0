"""From files of vessels to sequences of word ids: who is trained on, who is held out, what the words mean."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from anabatic.config.vessels.train import NO_HELDOUT, WordsJob
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import write_atomic
from anabatic.models import classifier, weights_reader
from anabatic.models.pretrained import resolve_model_folder
from anabatic.vessels.io import split_file as splits
from anabatic.vessels.io.split_file import VesselSplit
from anabatic.vessels.words.segment_reader import read_segments
from anabatic.vessels.words.segments import Segment, SegmentSet
from anabatic.vessels.words.vocabulary import WordSpec

WORDS_FILE, SPLIT_FILE = "words.json", "split.json"
"""In the folder of every model of words: the word spec and the way it was trained; which vessel is on which side."""

_MIN_RELIABLE_VESSELS = 30
"""Vessels; a share of fewer is known to 18 points at best."""


@dataclass
class BaseModelInfo:
    """What a model that training continues from says of its words.

    Attributes:
        folder: None: there is no such model.
        words: name of the word spec; None: it knows none.
        description: of a classifier.
        split: its vessels.
    """

    folder: Path | None = None
    words: str | None = None
    description: classifier.ClassifierDescription | None = None
    split: VesselSplit | None = None


def read_base_model_info(path: str | None) -> BaseModelInfo:
    """Read what lies beside the weights of a model.

    Raises:
        DataError: the folder or a file in it cannot be read.
    """
    if path is None:
        return BaseModelInfo()
    folder = resolve_model_folder(path)
    found = BaseModelInfo(folder)
    if classifier.is_classifier(folder):
        found.description = classifier.read_description(folder)
        found.words = found.description.words
    elif (folder / WORDS_FILE).is_file():
        found.words = str(weights_reader.read_json_object(folder / WORDS_FILE).get("words"))
    if (folder / SPLIT_FILE).is_file():
        found.split = splits.load_split(folder / SPLIT_FILE)
    return found


@dataclass
class VesselSegments:
    """What was read.

    Attributes:
        train, valid: segments of each side; valid is empty where nobody is held out.
        classes: names.
        spec: what the words are.
        split: who is on which side.
        windows: lengths that the tracks were cut to, in points; empty: the rows do not say.
    """

    train: list[Segment]
    valid: list[Segment]
    classes: tuple[str, ...]
    spec: WordSpec
    split: VesselSplit
    windows: tuple[int, ...]


def read_vessel_segments(job: WordsJob, base: BaseModelInfo) -> VesselSegments:
    """Read the segments and part them by vessel.

    Raises:
        ConfigError, DataError: a file or a row cannot be used; classes or words that are not the model's; a vessel on
            both sides.
    """
    rows, reading = job.data, job.tracks
    if base.description is not None:
        own = base.description
        reading = replace(reading.with_window_lengths(own.points), classes=reading.classes or list(own.classes))
    expect = None
    if base.folder is not None and base.words is not None:
        expect = WordSpec.parse_model_spec(base.folder, base.words)
    train = read_segments(rows.train, reading, expect)
    _require_classes(train.classes, base)
    # Class words of held-out vessels would be part of what they are tested on.
    plain = replace(reading, keep_class_word=False, classes=list(train.classes))
    valid = read_segments(rows.valid, plain, train.spec) if rows.valid and rows.holds_out else None
    split = _split_vessels(job, train, valid, base)
    known = [row for row in train.rows if split.find_side(row.vessel) in ("train", "")]
    if valid is None:
        valid = read_segments(rows.train, plain, train.spec) if reading.keep_class_word else train
    held_out = [row for row in valid.rows if split.find_side(row.vessel) == "valid"]
    vessels = VesselSegments(known, held_out, train.classes, train.spec, split, train.window_lengths)
    _log_split(vessels, rows.holds_out)
    return vessels


def keep_labelled_segments(vessels: VesselSegments) -> VesselSegments:
    """Leave out the segments without a class.

    Raises:
        DataError: none is left on a side.
    """
    sides = [[row for row in side if row.label is not None] for side in (vessels.train, vessels.valid)]
    lost = len(vessels.train) + len(vessels.valid) - sum(map(len, sides))
    if lost:
        log.warn(f"{lost:,} segments have no class and are left out")
    if not sides[0] or (vessels.valid and not sides[1]):
        raise DataError(f"{lost:,} segments have no class, and none is left", 'rows need a "label", tables a type')
    return replace(vessels, train=sides[0], valid=sides[1])


def _require_classes(classes: tuple[str, ...], base: BaseModelInfo) -> None:
    if base.description is not None and base.description.classes != classes:
        raise DataError(
            f"the rows have {len(classes)} classes ({', '.join(classes[:3])}, ...), {base.folder} has"
            f" {len(base.description.classes)} ({', '.join(base.description.classes[:3])}, ...)",
            "give the model's in tracks.classes, or train from the model that `classify pretrain` left",
        )


def _split_vessels(job: WordsJob, train: SegmentSet, valid: SegmentSet | None, base: BaseModelInfo) -> VesselSplit:
    rows = job.data
    if not rows.holds_out:
        split = VesselSplit(tuple(sorted({row.vessel for row in train})), (), (), job.seed)
    elif valid is not None:
        held_out = {row.vessel for row in valid}
        both = held_out & {row.vessel for row in train}
        if both:
            raise DataError(
                f"{len(both)} vessels are in data.train and in data.valid, such as {min(both)}",
                "hold whole vessels out, or leave data.valid out and let data.valid_fraction choose them",
            )
        split = VesselSplit(tuple(sorted({row.vessel for row in train})), tuple(sorted(held_out)), (), job.seed)
    elif rows.split is not None:
        split = splits.load_split(Path(rows.split))
    elif base.split is not None:
        split = base.split
        log.info(f"vessels are held out as {base.folder} did")
    else:
        split = splits.make_split(splits.find_majority_labels(train), rows.valid_fraction, rows.test_fraction, job.seed)
    seen = set(base.split.train) & {*split.valid, *split.test} if base.split else set()
    if seen:
        raise ConfigError(
            f"{base.folder} was trained on {len(seen)} of the vessels that are held out now, such as {min(seen)}",
            "leave data.split and data.valid out: its own split is then used",
        )
    return split


def _log_split(vessels: VesselSegments, holds_out: bool) -> None:
    if not vessels.train or (vessels.split.valid and not vessels.valid):
        raise DataError(
            f"{len(vessels.train):,} segments to train on, {len(vessels.valid):,} held out",
            "the split does not fit the rows: give another, or leave it out",
        )
    sides = [(len(side), len({row.vessel for row in side})) for side in (vessels.train, vessels.valid)]
    (rows, ships), (held_rows, held_ships) = sides
    log.info(
        f"{rows:,} segments of {ships:,} vessels to train on, {held_rows:,} of {held_ships:,} held out;"
        f" words {vessels.spec.spec_name}"
    )
    if not held_ships:
        why = "of no class are there two vessels" if holds_out else f"data.valid is {NO_HELDOUT}"
        log.warn(f"nobody is held out, {why}: the model gets no score, and its last state is kept")
    elif held_ships < _MIN_RELIABLE_VESSELS:
        half = 1.96 * math.sqrt(0.25 / held_ships)
        log.warn(
            f"a score of {held_ships} vessels is worth little: chance alone moves it by"
            f" {min(half, 1.0):.0%} up or down (95 %, at one half)"
        )


def word_model_files(vessels: VesselSegments, attention: str) -> dict[str, str]:
    """Return what lies beside the weights of every model of words: name -> content."""
    words = {"words": vessels.spec.spec_name, "attention": attention}
    split = json.dumps(vessels.split.as_json(), ensure_ascii=False, indent=1)
    return {WORDS_FILE: json.dumps(words, indent=1) + "\n", SPLIT_FILE: split + "\n"}


def write_word_model_files(folder: Path, beside: dict[str, str]) -> None:
    """Write `word_model_files` into a folder."""
    for name, content in beside.items():
        write_atomic(folder / name, content)
