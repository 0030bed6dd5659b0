"""`anabatic classify predict`: rows of words, AIS tables or a text in, classes out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from anabatic.config.vessels.predict import ClassifyPredictJob
from anabatic.config.vessels.tracks import TrackSettings
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import resolve_output_file, write_atomic
from anabatic.core.progress import ProgressBar
from anabatic.vessels.io import split_file as splits
from anabatic.vessels.io import vessel_splits
from anabatic.vessels.io.split_file import VesselSplit
from anabatic.vessels.metrics import classification
from anabatic.vessels.model.trajectory_classifier import TrajectoryClassifier
from anabatic.vessels.words.encoding import select_features
from anabatic.vessels.words.segment_reader import read_segments
from anabatic.vessels.words.segments import Segment
from anabatic.vessels.words.vocabulary import WordSpec, count_points, strip_class_words

SEGMENTS_PER_CHUNK = 4096
"""Segments between two signs of progress; among so many there are enough of like length for whole batches."""


def run(job: ClassifyPredictJob) -> int:
    """Classify as the job says; return the exit code."""
    classifier = TrajectoryClassifier(job.model, job.device, job.batch_tokens)
    segments = _read_inputs(job, classifier)
    found = predict_probabilities(classifier, segments)
    rows = _format_vessel_rows if job.level == "vessel" else _format_segment_rows
    split = _load_training_split(classifier)
    sided = ({**row, "split": split.find_side(row["vessel"]) or None} for row in rows(job, classifier, segments, found))
    lines = [json.dumps(row, ensure_ascii=False) for row in sided]
    text = "\n".join(lines) + "\n"
    if job.out is None:
        sys.stdout.write(text)
    else:
        out = resolve_output_file(job.out, "predictions.jsonl")
        write_atomic(out, text)
        log.info(f"wrote {len(lines):,} rows to {out}")
    return 0


def _load_training_split(classifier: TrajectoryClassifier) -> VesselSplit:
    """Which vessels the classifier was trained on; a folder that does not say so knows none."""
    path = classifier.folder / vessel_splits.SPLIT_FILE
    return splits.load_split(path) if path.exists() else VesselSplit((), ())


def predict_probabilities(classifier: TrajectoryClassifier, segments: list[Segment]) -> np.ndarray:
    """Return the probabilities of segments, fp64 `[n, C]`, in the order of `classifier.classes`.

    Raises:
        DataError: a row without the numbers that the classifier reads.
    """
    names = classifier.description.features
    bare = all(row.features is None for row in segments) and classifier.description.features_hidden > 0
    known = None if bare else select_features(segments, names)
    found = np.empty((len(segments), len(classifier.class_names)))
    with ProgressBar("segments", len(segments)) as bar:
        for start in range(0, len(segments), SEGMENTS_PER_CHUNK):
            some = segments[start : start + SEGMENTS_PER_CHUNK]
            own = None if known is None else known[start : start + SEGMENTS_PER_CHUNK]
            found[start : start + SEGMENTS_PER_CHUNK] = classifier.predict_probabilities(
                [row.text for row in some], own
            )
            bar.update(start + len(some))
    if known is None:
        return found
    return classifier.mix_vessel_trees(found, known, [row.vessel for row in segments], [row.start for row in segments])


def _read_inputs(job: ClassifyPredictJob, classifier: TrajectoryClassifier) -> list[Segment]:
    if job.text:
        return [_segment_from_text(text, number) for number, text in enumerate(job.text, start=1)]
    return read_classifier_segments(job.inputs, job.tracks, classifier)


def read_classifier_segments(data: list[str], tracks: TrackSettings, classifier: TrajectoryClassifier) -> list[Segment]:
    """Read what is to be classified, in the classifier's words and cut as its training data were; labels that the rows
    have are kept for `true_label`.

    Raises:
        DataError: rows of other words, or of other classes than the classifier's.
    """
    expect = WordSpec.parse_model_spec(classifier.folder, classifier.description.words, classifier.class_names)
    found = read_segments(data, tracks.with_window_lengths(classifier.description.points), expect)
    known = any(row.label is not None for row in found)
    if known and found.classes != classifier.class_names:
        raise DataError(
            f"the files have {len(found.classes)} classes ({', '.join(found.classes[:3])}, ...), the classifier has"
            f" {len(classifier.class_names)} ({', '.join(classifier.class_names[:3])}, ...)",
            "name the classifier's in tracks.classes, and map the others with tracks.class_map",
        )
    return found.rows


def _segment_from_text(text: str, number: int) -> Segment:
    plain, words = strip_class_words(text)
    if words:
        log.warn(f"text {number}: {words} class words are not read")
    return Segment(plain, None, f"text {number}", "", None, count_points(plain.split()), None, number)


def _format_segment_rows(
    job: ClassifyPredictJob, classifier: TrajectoryClassifier, segments: list[Segment], found: np.ndarray
) -> Iterator[dict[str, Any]]:
    for number, (segment, row) in enumerate(zip(segments, found, strict=True)):
        told = classifier.make_prediction(row, job.abstain).as_json()
        text = {"original_text": segment.text} if job.original_text else {}
        yield {
            "id": number,
            **text,
            **_true_label_fields(classifier, segment.label),
            **told,
            **_segment_metadata(segment),
        }


def _segment_metadata(segment: Segment) -> dict[str, Any]:
    return {
        "vessel": segment.vessel,
        "source_file": segment.source_file,
        "start": segment.start,
        "points": segment.points,
        "window": segment.window or None,
        "place": segment.place,
    }


def _format_vessel_rows(
    job: ClassifyPredictJob, classifier: TrajectoryClassifier, segments: list[Segment], found: np.ndarray
) -> Iterator[dict[str, Any]]:
    ships = [segment.vessel for segment in segments]
    names, means = classification.pool_by_vessel(found, ships)
    labels: dict[str, int | None] = {}
    count: dict[str, int] = {}
    for segment in segments:
        labels.setdefault(segment.vessel, segment.label)
        count[segment.vessel] = count.get(segment.vessel, 0) + 1
    for number, (name, row) in enumerate(zip(names, means, strict=True)):
        told = classifier.make_prediction(row, job.abstain).as_json()
        yield {
            "id": number,
            "vessel": name,
            **_true_label_fields(classifier, labels[name]),
            **told,
            "segments": count[name],
        }


def _true_label_fields(classifier: TrajectoryClassifier, label: int | None) -> dict[str, Any]:
    """As `predicted_class` and `class_name` say what was found."""
    return {"true_label": label, "true_class": None if label is None else classifier.class_names[label]}
