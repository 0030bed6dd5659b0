"""`anabatic classify predict`: predict the classes of rows of words, AIS tables or texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import resolve_output_file, write_atomic
from anabatic.core.progress import ProgressBar
from anabatic_vessels.config.predict import ClassifyPredictJob
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io import split_file as splits
from anabatic_vessels.io import vessel_splits
from anabatic_vessels.io.split_file import VesselSplit
from anabatic_vessels.metrics import classification
from anabatic_vessels.model.trajectory_classifier import TrajectoryClassifier
from anabatic_vessels.words.encoding import select_features
from anabatic_vessels.words.segment_reader import read_segments
from anabatic_vessels.words.segments import Segment
from anabatic_vessels.words.vocabulary import WordSpec, count_points, strip_class_words

SEGMENTS_PER_CHUNK = 4096
"""Segments between two progress updates; enough to fill batches with segments of similar length."""


def run(job: ClassifyPredictJob) -> int:
    """Run the prediction job; return the exit code."""
    classifier = TrajectoryClassifier(job.model, job.device, job.batch_tokens)
    segments = _read_inputs(job, classifier)
    probabilities = predict_probabilities(classifier, segments)
    format_rows = _format_vessel_rows if job.level == "vessel" else _format_segment_rows
    split = _load_training_split(classifier)
    split_rows = (
        {**row, "split": split.find_side(row["vessel"]) or None}
        for row in format_rows(job, classifier, segments, probabilities)
    )
    lines = [json.dumps(row, ensure_ascii=False) for row in split_rows]
    text = "\n".join(lines) + "\n"
    if job.out is None:
        sys.stdout.write(text)
    else:
        out = resolve_output_file(job.out, "predictions.jsonl")
        write_atomic(out, text)
        log.info(f"wrote {len(lines):,} rows to {out}")
    return 0


def _load_training_split(classifier: TrajectoryClassifier) -> VesselSplit:
    """Return the split of the classifier; empty if its folder has none."""
    path = classifier.folder / vessel_splits.SPLIT_FILE
    return splits.load_split(path) if path.exists() else VesselSplit((), ())


def predict_probabilities(classifier: TrajectoryClassifier, segments: list[Segment]) -> np.ndarray:
    """Return the probabilities of segments, fp64 `[n, C]`, in the order of `classifier.class_names`.

    Raises:
        DataError: a row lacks the features that the classifier reads.
    """
    names = classifier.description.features
    without_features = all(row.features is None for row in segments) and classifier.description.features_hidden > 0
    features = None if without_features else select_features(segments, names)
    probabilities = np.empty((len(segments), len(classifier.class_names)))
    with ProgressBar("segments", len(segments)) as bar:
        for start in range(0, len(segments), SEGMENTS_PER_CHUNK):
            chunk = segments[start : start + SEGMENTS_PER_CHUNK]
            chunk_features = None if features is None else features[start : start + SEGMENTS_PER_CHUNK]
            probabilities[start : start + SEGMENTS_PER_CHUNK] = classifier.predict_probabilities(
                [row.text for row in chunk], chunk_features
            )
            bar.update(start + len(chunk))
    if features is None:
        return probabilities
    return classifier.mix_vessel_trees(
        probabilities, features, [row.vessel for row in segments], [row.start for row in segments]
    )


def _read_inputs(job: ClassifyPredictJob, classifier: TrajectoryClassifier) -> list[Segment]:
    if job.text:
        return [_segment_from_text(text, index) for index, text in enumerate(job.text, start=1)]
    return read_classifier_segments(job.inputs, job.tracks, classifier)


def read_classifier_segments(data: list[str], tracks: TrackSettings, classifier: TrajectoryClassifier) -> list[Segment]:
    """Read the segments to classify, encoded and cut as the training data of the classifier; labels of the rows are
    kept for `true_label`.

    Raises:
        DataError: words or classes of the rows differ from those of the classifier.
    """
    expected_spec = WordSpec.parse_model_spec(classifier.folder, classifier.description.words, classifier.class_names)
    segments = read_segments(data, tracks.with_window_lengths(classifier.description.points), expected_spec)
    has_labels = any(row.label is not None for row in segments)
    if has_labels and segments.classes != classifier.class_names:
        raise DataError(
            f"the files have {len(segments.classes)} classes ({', '.join(segments.classes[:3])},"
            f" ...), the classifier has {len(classifier.class_names)} ({', '.join(classifier.class_names[:3])}, ...)",
            "name the classifier's in tracks.classes, and map the others with tracks.class_map",
        )
    return segments.rows


def _segment_from_text(text: str, index: int) -> Segment:
    stripped, num_class_words = strip_class_words(text)
    if num_class_words:
        log.warn(f"text {index}: {num_class_words} class words are not read")
    return Segment(stripped, None, f"text {index}", "", None, count_points(stripped.split()), None, index)


def _format_segment_rows(
    job: ClassifyPredictJob, classifier: TrajectoryClassifier, segments: list[Segment], probabilities: np.ndarray
) -> Iterator[dict[str, Any]]:
    for index, (segment, row) in enumerate(zip(segments, probabilities, strict=True)):
        prediction = classifier.make_prediction(row, job.abstain).as_json()
        text = {"original_text": segment.text} if job.original_text else {}
        yield {
            "id": index,
            **text,
            **_true_label_fields(classifier, segment.label),
            **prediction,
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
    job: ClassifyPredictJob, classifier: TrajectoryClassifier, segments: list[Segment], probabilities: np.ndarray
) -> Iterator[dict[str, Any]]:
    vessels = [segment.vessel for segment in segments]
    names, means = classification.pool_by_vessel(probabilities, vessels)
    labels: dict[str, int | None] = {}
    num_segments: dict[str, int] = {}
    for segment in segments:
        labels.setdefault(segment.vessel, segment.label)
        num_segments[segment.vessel] = num_segments.get(segment.vessel, 0) + 1
    for index, (name, row) in enumerate(zip(names, means, strict=True)):
        prediction = classifier.make_prediction(row, job.abstain).as_json()
        yield {
            "id": index,
            "vessel": name,
            **_true_label_fields(classifier, labels[name]),
            **prediction,
            "segments": num_segments[name],
        }


def _true_label_fields(classifier: TrajectoryClassifier, label: int | None) -> dict[str, Any]:
    """Return the fields of the true label, parallel to `predicted_class` and `class_name`."""
    return {"true_label": label, "true_class": None if label is None else classifier.class_names[label]}
