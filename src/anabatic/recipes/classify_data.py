"""From files of vessels to sequences of word ids: who is trained on, who is held out, what the words mean."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from anabatic.config.classify_train import NONE, WordsJob
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.paths import write_atomic
from anabatic.models import classifier, stored
from anabatic.models.hf import resolve
from anabatic.trajectory import split as splits
from anabatic.trajectory.read import read_segments
from anabatic.trajectory.segment import Segment, Segments
from anabatic.trajectory.split import Split
from anabatic.trajectory.words import WordSpec

WORDS, SPLIT = "words.json", "split.json"
"""In the folder of every model of words: the word spec and the way it was trained; which vessel is on which side."""

_FEW = 30
"""Vessels; a share of fewer is known to 18 points at best."""


@dataclass
class Base:
    """What a model that training goes on from says of its words.

    Attributes:
        folder: None: there is no such model.
        words: name of the word spec; None: it knows none.
        description: of a classifier.
        split: its vessels.
    """

    folder: Path | None = None
    words: str | None = None
    description: classifier.Description | None = None
    split: Split | None = None


def base_of(path: str | None) -> Base:
    """Read what lies beside the weights of a model.

    Raises:
        DataError: the folder or a file in it cannot be read.
    """
    if path is None:
        return Base()
    folder = resolve(path)
    found = Base(folder)
    if classifier.is_classifier(folder):
        found.description = classifier.read_description(folder)
        found.words = found.description.words
    elif (folder / WORDS).is_file():
        found.words = str(stored.read_json(folder / WORDS).get("words"))
    if (folder / SPLIT).is_file():
        found.split = splits.load(folder / SPLIT)
    return found


@dataclass
class Vessels:
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
    split: Split
    windows: tuple[int, ...]


def read(job: WordsJob, base: Base) -> Vessels:
    """Read the segments and part them by vessel.

    Raises:
        ConfigError, DataError: a file or a row cannot be used; classes or words that are not the model's; a vessel on
            both sides.
    """
    rows, reading = job.data, job.tracks
    if base.description is not None:
        own = base.description
        reading = replace(reading.cut_as(own.points), classes=reading.classes or list(own.classes))
    expect = None
    if base.folder is not None and base.words is not None:
        expect = WordSpec.of_model(base.folder, base.words)
    train = read_segments(rows.train, reading, expect)
    _require_classes(train.classes, base)
    # Class words of held-out vessels would be part of what they are tested on.
    plain = replace(reading, keep_class_word=False, classes=list(train.classes))
    valid = read_segments(rows.valid, plain, train.spec) if rows.valid and rows.holds_out else None
    split = _split(job, train, valid, base)
    known = [row for row in train.rows if split.side(row.vessel) in ("train", "")]
    if valid is None:
        valid = read_segments(rows.train, plain, train.spec) if reading.keep_class_word else train
    held_out = [row for row in valid.rows if split.side(row.vessel) == "valid"]
    vessels = Vessels(known, held_out, train.classes, train.spec, split, train.windows)
    _tell(vessels, rows.holds_out)
    return vessels


def labelled(vessels: Vessels) -> Vessels:
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


def _require_classes(classes: tuple[str, ...], base: Base) -> None:
    if base.description is not None and base.description.classes != classes:
        raise DataError(
            f"the rows have {len(classes)} classes ({', '.join(classes[:3])}, ...), {base.folder} has"
            f" {len(base.description.classes)} ({', '.join(base.description.classes[:3])}, ...)",
            "give the model's in tracks.classes, or train from the model that `classify pretrain` left",
        )


def _split(job: WordsJob, train: Segments, valid: Segments | None, base: Base) -> Split:
    rows = job.data
    if not rows.holds_out:
        split = Split(tuple(sorted({row.vessel for row in train})), (), (), job.seed)
    elif valid is not None:
        held_out = {row.vessel for row in valid}
        both = held_out & {row.vessel for row in train}
        if both:
            raise DataError(
                f"{len(both)} vessels are in data.train and in data.valid, such as {min(both)}",
                "hold whole vessels out, or leave data.valid out and let data.valid_fraction choose them",
            )
        split = Split(tuple(sorted({row.vessel for row in train})), tuple(sorted(held_out)), (), job.seed)
    elif rows.split is not None:
        split = splits.load(Path(rows.split))
    elif base.split is not None:
        split = base.split
        log.info(f"vessels are held out as {base.folder} did")
    else:
        split = splits.make(splits.vessel_labels(train), rows.valid_fraction, rows.test_fraction, job.seed)
    seen = set(base.split.train) & {*split.valid, *split.test} if base.split else set()
    if seen:
        raise ConfigError(
            f"{base.folder} was trained on {len(seen)} of the vessels that are held out now, such as {min(seen)}",
            "leave data.split and data.valid out: its own split is then used",
        )
    return split


def _tell(vessels: Vessels, holds_out: bool) -> None:
    if not vessels.train or (vessels.split.valid and not vessels.valid):
        raise DataError(
            f"{len(vessels.train):,} segments to train on, {len(vessels.valid):,} held out",
            "the split does not fit the rows: give another, or leave it out",
        )
    sides = [(len(side), len({row.vessel for row in side})) for side in (vessels.train, vessels.valid)]
    (rows, ships), (held_rows, held_ships) = sides
    log.info(
        f"{rows:,} segments of {ships:,} vessels to train on, {held_rows:,} of {held_ships:,} held out;"
        f" words {vessels.spec.name}"
    )
    if not held_ships:
        why = "of no class are there two vessels" if holds_out else f"data.valid is {NONE}"
        log.warn(f"nobody is held out, {why}: the model gets no score, and its last state is kept")
    elif held_ships < _FEW:
        half = 1.96 * math.sqrt(0.25 / held_ships)
        log.warn(
            f"a score of {held_ships} vessels is worth little: chance alone moves it by"
            f" {min(half, 1.0):.0%} up or down (95 %, at one half)"
        )


def files(vessels: Vessels, attention: str) -> dict[str, str]:
    """Return what lies beside the weights of every model of words: name -> content."""
    words = {"words": vessels.spec.name, "attention": attention}
    split = json.dumps(vessels.split.as_json(), ensure_ascii=False, indent=1)
    return {WORDS: json.dumps(words, indent=1) + "\n", SPLIT: split + "\n"}


def write(folder: Path, beside: dict[str, str]) -> None:
    """Write `files` into a folder."""
    for name, content in beside.items():
        write_atomic(folder / name, content)
