"""Read vessel files as training and held-out segments, split by vessel."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import write_atomic
from anabatic.models import classifier, weight_files
from anabatic.models.pretrained import resolve_model_folder
from anabatic_vessels.config.train import NO_HELDOUT, WordsJob
from anabatic_vessels.io import split_file as splits
from anabatic_vessels.io.description import TrajectoryDescription, read_description
from anabatic_vessels.io.split_file import VesselSplit
from anabatic_vessels.words.segment_reader import read_segments
from anabatic_vessels.words.segments import Segment, SegmentSet
from anabatic_vessels.words.vocabulary import WordSpec

WORDS_FILE, SPLIT_FILE = "words.json", "split.json"
"""Files in the folder of every model of vessel words: the word spec and the attention; the split of the vessels."""

_MIN_RELIABLE_VESSELS = 30
"""Vessels below which a score is unreliable: the 95 % interval of a fraction is +-18 points or wider."""


@dataclass
class BaseModelInfo:
    """Files of the base model that describe its words.

    Attributes:
        folder: folder of the model; None: no base model.
        words: name of the word spec; None: none.
        description: description of a classifier.
        split: split of the vessels.
    """

    folder: Path | None = None
    words: str | None = None
    description: TrajectoryDescription | None = None
    split: VesselSplit | None = None


def read_base_model_info(path: str | None) -> BaseModelInfo:
    """Read the files that are stored with the weights of a model.

    Raises:
        DataError: the folder or a file in it cannot be read.
    """
    if path is None:
        return BaseModelInfo()
    folder = resolve_model_folder(path)
    info = BaseModelInfo(folder)
    if classifier.is_classifier(folder):
        info.description = read_description(folder)
        info.words = info.description.words
    elif (folder / WORDS_FILE).is_file():
        info.words = str(weight_files.read_json_object(folder / WORDS_FILE).get("words"))
    if (folder / SPLIT_FILE).is_file():
        info.split = splits.load_split(folder / SPLIT_FILE)
    return info


@dataclass
class VesselSegments:
    """Segments of both sides of a split.

    Attributes:
        train, valid: segments of each side; valid is empty if no vessel is held out.
        classes: class names.
        spec: spec of the words.
        split: the split of the vessels.
        windows: lengths to which the tracks were cut, in points; empty: unknown.
    """

    train: list[Segment]
    valid: list[Segment]
    classes: tuple[str, ...]
    spec: WordSpec
    split: VesselSplit
    windows: tuple[int, ...]


def read_vessel_segments(job: WordsJob, base: BaseModelInfo) -> VesselSegments:
    """Read the segments and split them by vessel.

    Raises:
        ConfigError, DataError: a file or a row cannot be used; classes or words differ from those of the model; a
            vessel is on both sides.
    """
    data, settings = job.data, job.tracks
    if base.description is not None:
        description = base.description
        settings = replace(
            settings.with_window_lengths(description.points), classes=settings.classes or list(description.classes)
        )
    expected_spec = None
    if base.folder is not None and base.words is not None:
        expected_spec = WordSpec.parse_model_spec(base.folder, base.words)
    train = read_segments(data.train, settings, expected_spec)
    _require_classes(train.classes, base)
    # Class words of held-out vessels would leak their labels.
    heldout_settings = replace(settings, keep_class_word=False, classes=list(train.classes))
    valid = read_segments(data.valid, heldout_settings, train.spec) if data.valid and data.holds_out else None
    split = _split_vessels(job, train, valid, base)
    train_rows = [row for row in train.rows if split.find_side(row.vessel) in ("train", "")]
    if valid is None:
        valid = read_segments(data.train, heldout_settings, train.spec) if settings.keep_class_word else train
    held_out = [row for row in valid.rows if split.find_side(row.vessel) == "valid"]
    vessels = VesselSegments(train_rows, held_out, train.classes, train.spec, split, train.window_lengths)
    _log_split(vessels, data.holds_out)
    return vessels


def keep_labelled_segments(vessels: VesselSegments) -> VesselSegments:
    """Remove the segments without a class.

    Raises:
        DataError: no segment remains on a side.
    """
    sides = [[row for row in side if row.label is not None] for side in (vessels.train, vessels.valid)]
    num_lost = len(vessels.train) + len(vessels.valid) - sum(map(len, sides))
    if num_lost:
        log.warn(f"{num_lost:,} segments have no class and are left out")
    if not sides[0] or (vessels.valid and not sides[1]):
        raise DataError(f"{num_lost:,} segments have no class, and none is left", 'rows need a "label", tables a type')
    return replace(vessels, train=sides[0], valid=sides[1])


def _require_classes(classes: tuple[str, ...], base: BaseModelInfo) -> None:
    if base.description is not None and base.description.classes != classes:
        raise DataError(
            f"the rows have {len(classes)} classes ({', '.join(classes[:3])}, ...), {base.folder} has"
            f" {len(base.description.classes)} ({', '.join(base.description.classes[:3])}, ...)",
            "give the model's in tracks.classes, or train from the model that `classify pretrain` left",
        )


def _split_vessels(job: WordsJob, train: SegmentSet, valid: SegmentSet | None, base: BaseModelInfo) -> VesselSplit:
    data = job.data
    if not data.holds_out:
        split = VesselSplit(tuple(sorted({row.vessel for row in train})), (), (), job.seed)
    elif valid is not None:
        held_out = {row.vessel for row in valid}
        shared = held_out & {row.vessel for row in train}
        if shared:
            raise DataError(
                f"{len(shared)} vessels are in data.train and in data.valid, such as {min(shared)}",
                "hold whole vessels out, or leave data.valid out and let data.valid_fraction choose them",
            )
        split = VesselSplit(tuple(sorted({row.vessel for row in train})), tuple(sorted(held_out)), (), job.seed)
    elif data.split is not None:
        split = splits.load_split(Path(data.split))
    elif base.split is not None:
        split = base.split
        log.info(f"vessels are held out as {base.folder} did")
    else:
        split = splits.make_split(splits.find_majority_labels(train), data.valid_fraction, data.test_fraction, job.seed)
    leaked = set(base.split.train) & {*split.valid, *split.test} if base.split else set()
    if leaked:
        raise ConfigError(
            f"{base.folder} was trained on {len(leaked)} of the vessels that are held out now, such as {min(leaked)}",
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
    (train_rows, train_vessels), (valid_rows, valid_vessels) = sides
    log.info(
        f"{train_rows:,} segments of {train_vessels:,} vessels to train on, {valid_rows:,} of"
        f" {valid_vessels:,} held out; words {vessels.spec.spec_name}"
    )
    if not valid_vessels:
        reason = "of no class are there two vessels" if holds_out else f"data.valid is {NO_HELDOUT}"
        log.warn(f"nobody is held out, {reason}: the model gets no score, and its last state is kept")
    elif valid_vessels < _MIN_RELIABLE_VESSELS:
        half_width = 1.96 * math.sqrt(0.25 / valid_vessels)
        log.warn(
            f"a score of {valid_vessels} vessels is worth little: chance alone moves it by"
            f" {min(half_width, 1.0):.0%} up or down (95 %, at one half)"
        )


def word_model_files(vessels: VesselSegments, attention: str) -> dict[str, str]:
    """Return the files stored with the weights of every model of vessel words: name -> content."""
    description = {"words": vessels.spec.spec_name, "attention": attention}
    split = json.dumps(vessels.split.as_json(), ensure_ascii=False, indent=1)
    return {WORDS_FILE: json.dumps(description, indent=1) + "\n", SPLIT_FILE: split + "\n"}


def write_word_model_files(folder: Path, files: dict[str, str]) -> None:
    """Write `word_model_files` into a folder."""
    for name, content in files.items():
        write_atomic(folder / name, content)
