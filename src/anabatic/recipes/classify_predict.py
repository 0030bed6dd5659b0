"""`anabatic classify predict`: rows of words, AIS tables or a text in, classes out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from anabatic.config.classify_predict import ClassifyPredictJob
from anabatic.config.reading import Reading
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import output_file, write_atomic
from anabatic.evals.progress import Bar
from anabatic.infer.classify import TrajectoryClassifier
from anabatic.recipes import classify_data
from anabatic.recipes.classify_rows import numbers
from anabatic.trajectory import metrics
from anabatic.trajectory import split as splits
from anabatic.trajectory.read import read_segments
from anabatic.trajectory.segment import Segment
from anabatic.trajectory.split import Split
from anabatic.trajectory.words import WordSpec, points_of, strip_class_words

AT_ONCE = 4096
"""Segments between two signs of progress; among so many there are enough of like length for whole batches."""


def run(job: ClassifyPredictJob) -> int:
    """Classify as the job says; return the exit code."""
    classifier = TrajectoryClassifier(job.model, job.device, job.batch_tokens)
    segments = _read(job, classifier)
    found = ask(classifier, segments)
    rows = _vessel_rows if job.level == "vessel" else _segment_rows
    split = _split(classifier)
    sided = ({**row, "split": split.side(row["vessel"]) or None} for row in rows(job, classifier, segments, found))
    lines = [json.dumps(row, ensure_ascii=False) for row in sided]
    text = "\n".join(lines) + "\n"
    if job.out is None:
        sys.stdout.write(text)
    else:
        out = output_file(job.out, "predictions.jsonl")
        write_atomic(out, text)
        log.info(f"wrote {len(lines):,} rows to {out}")
    return 0


def _split(classifier: TrajectoryClassifier) -> Split:
    """Which vessels the classifier was trained on; a folder that does not say so knows none."""
    path = classifier.folder / classify_data.SPLIT
    return splits.load(path) if path.exists() else Split((), ())


def ask(classifier: TrajectoryClassifier, segments: list[Segment]) -> np.ndarray:
    """Return the probabilities of segments, fp64 `[n, C]`, in the order of `classifier.classes`.

    Raises:
        DataError: a row without the numbers that the classifier reads.
    """
    names = classifier.description.features
    bare = all(row.features is None for row in segments) and classifier.description.features_hidden > 0
    known = None if bare else numbers(segments, names)
    found = np.empty((len(segments), len(classifier.classes)))
    with Bar("segments", len(segments)) as bar:
        for start in range(0, len(segments), AT_ONCE):
            some = segments[start : start + AT_ONCE]
            own = None if known is None else known[start : start + AT_ONCE]
            found[start : start + AT_ONCE] = classifier.probabilities([row.text for row in some], own)
            bar.to(start + len(some))
    if known is None:
        return found
    return classifier.with_vessels(found, known, [row.vessel for row in segments], [row.start for row in segments])


def _read(job: ClassifyPredictJob, classifier: TrajectoryClassifier) -> list[Segment]:
    if job.text:
        return [_segment(text, number) for number, text in enumerate(job.text, start=1)]
    return segments_of(job.inputs, job.tracks, classifier)


def segments_of(data: list[str], tracks: Reading, classifier: TrajectoryClassifier) -> list[Segment]:
    """Read what is to be classified, in the classifier's words and cut as its training data were; labels that the rows
    have are kept for `true_label`.

    Raises:
        DataError: rows of other words, or of other classes than the classifier's.
    """
    expect = WordSpec.of_model(classifier.folder, classifier.description.words, classifier.classes)
    found = read_segments(data, tracks.cut_as(classifier.description.points), expect)
    known = any(row.label is not None for row in found)
    if known and found.classes != classifier.classes:
        raise DataError(
            f"the files have {len(found.classes)} classes ({', '.join(found.classes[:3])}, ...), the classifier has"
            f" {len(classifier.classes)} ({', '.join(classifier.classes[:3])}, ...)",
            "name the classifier's in tracks.classes, and map the others with tracks.class_map",
        )
    return found.rows


def _segment(text: str, number: int) -> Segment:
    plain, words = strip_class_words(text)
    if words:
        log.warn(f"text {number}: {words} class words are not read")
    return Segment(plain, None, f"text {number}", "", None, points_of(plain.split()), None, number)


def _segment_rows(
    job: ClassifyPredictJob, classifier: TrajectoryClassifier, segments: list[Segment], found: np.ndarray
) -> Iterator[dict[str, Any]]:
    for number, (segment, row) in enumerate(zip(segments, found, strict=True)):
        told = classifier.answer(row, job.abstain).as_json()
        text = {"original_text": segment.text} if job.original_text else {}
        yield {"id": number, **text, **_truth(classifier, segment.label), **told, **_of_segment(segment)}


def _of_segment(segment: Segment) -> dict[str, Any]:
    return {
        "vessel": segment.vessel,
        "source_file": segment.source_file,
        "start": segment.start,
        "points": segment.points,
        "window": segment.window or None,
        "place": segment.place,
    }


def _vessel_rows(
    job: ClassifyPredictJob, classifier: TrajectoryClassifier, segments: list[Segment], found: np.ndarray
) -> Iterator[dict[str, Any]]:
    ships = [segment.vessel for segment in segments]
    names, means = metrics.by_vessel(found, ships)
    labels: dict[str, int | None] = {}
    count: dict[str, int] = {}
    for segment in segments:
        labels.setdefault(segment.vessel, segment.label)
        count[segment.vessel] = count.get(segment.vessel, 0) + 1
    for number, (name, row) in enumerate(zip(names, means, strict=True)):
        told = classifier.answer(row, job.abstain).as_json()
        yield {"id": number, "vessel": name, **_truth(classifier, labels[name]), **told, "segments": count[name]}


def _truth(classifier: TrajectoryClassifier, label: int | None) -> dict[str, Any]:
    """As `predicted_class` and `class_name` say what was found."""
    return {"true_label": label, "true_class": None if label is None else classifier.classes[label]}
