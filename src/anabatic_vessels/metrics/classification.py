"""Classification metrics of a set of predictions, per segment and per vessel, with calibration and intervals over
vessels.

Inputs are `N x C` probabilities and `N` true classes; rows are segments or vessels. Definitions follow scikit-learn
(model_evaluation guide) with `zero_division=0`: macro-F1 is the mean over classes that occur as true or predicted
class, balanced accuracy the mean recall over classes that occur as true class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic_vessels.metrics.predictions import Predictions

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEFAULT_BINS = 10
"""Bins of the reliability table: 0 to 0.1, ..., 0.9 to 1."""


@dataclass(frozen=True)
class ClassScore:
    """One row of the per-class table."""

    name: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class ConfidenceInterval:
    """A fraction and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """Return the values, rounded to four places."""
        return {"value": round(self.value, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


@dataclass(frozen=True)
class CalibrationBin:
    """Rows with a confidence in `(low, high]`: their mean confidence and accuracy."""

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class ClassificationScores:
    """Scores of one set of predictions. `confusion` is `C x C`, true class in rows."""

    rows: int
    accuracy: float
    macro_f1: float
    balanced_accuracy: float
    classes: tuple[ClassScore, ...]
    confusion: Ints

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, rounded to four places."""
        table = {
            score.name: {
                "precision": round(score.precision, 4),
                "recall": round(score.recall, 4),
                "f1": round(score.f1, 4),
                "support": score.support,
            }
            for score in self.classes
        }
        return {
            "rows": self.rows,
            "accuracy": round(self.accuracy, 4),
            "macro_f1": round(self.macro_f1, 4),
            "balanced_accuracy": round(self.balanced_accuracy, 4),
            "classes": table,
            "confusion": self.confusion.tolist(),
        }


def compute_scores(truth: Ints, predicted: Ints, classes: Sequence[str]) -> ClassificationScores:
    """Score `N` predicted against `N` true classes.

    Args:
        truth: `N` indices of `classes`.
        predicted: `N` indices of `classes`.
        classes: `C` names.

    Raises:
        ValueError: there are no rows.
    """
    if not len(truth):
        raise ValueError("no rows to score")
    matrix = confusion_matrix(truth, predicted, len(classes))
    precision, recall, f1, present = _per_class_scores(matrix)
    support = matrix.sum(1)
    class_scores = tuple(
        ClassScore(name, float(precision[index]), float(recall[index]), float(f1[index]), int(support[index]))
        for index, name in enumerate(classes)
    )
    return ClassificationScores(
        rows=len(truth),
        accuracy=float(np.trace(matrix) / matrix.sum()),
        macro_f1=float(f1[present].mean()),
        balanced_accuracy=float(recall[support > 0].mean()),
        classes=class_scores,
        confusion=matrix,
    )


def confusion_matrix(truth: Ints, predicted: Ints, num_classes: int) -> Ints:
    """Return `C x C` counts: row = true class, column = predicted class."""
    counts: Ints = np.bincount(truth * num_classes + predicted, minlength=num_classes * num_classes).reshape(
        num_classes, num_classes
    )
    return counts


def _per_class_scores(matrix: Ints) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
    """Return precision, recall, F1 (`... x C` each) of `... x C x C` counts, and which classes occur."""
    hits = np.diagonal(matrix, axis1=-2, axis2=-1).astype(float)
    num_true, num_predicted = matrix.sum(-1), matrix.sum(-2)
    precision = hits / np.maximum(num_predicted, 1)
    recall = hits / np.maximum(num_true, 1)
    f1 = 2 * hits / np.maximum(num_true + num_predicted, 1)
    return precision, recall, f1, (num_true + num_predicted) > 0


MIN_PROBABILITY = 1e-6
"""Minimum probability of a class of a segment when the segments of a vessel are pooled."""


def pool_by_vessel(probabilities: Floats, vessels: Sequence[str]) -> tuple[list[str], Floats]:
    """Return the vessels in order of first appearance, and the geometric mean of their segments' probabilities,
    `V x C`, which sum to one.

    A logarithmic opinion pool (Genest and Zidek, Statistical Science 1986): a class that some segments rule out is
    unlikely for the vessel. Probabilities are clipped at `MIN_PROBABILITY`.
    """
    index_by_vessel: dict[str, int] = {}
    group = np.array([index_by_vessel.setdefault(vessel, len(index_by_vessel)) for vessel in vessels], dtype=np.int64)
    sums = np.zeros((len(index_by_vessel), probabilities.shape[1]))
    np.add.at(sums, group, np.log(np.maximum(probabilities, MIN_PROBABILITY)))
    counts = np.bincount(group, minlength=len(index_by_vessel))
    means = np.exp(sums / counts[:, None])
    return list(index_by_vessel), means / means.sum(1, keepdims=True)


def find_majority_truth(truth: Ints, vessels: Sequence[str]) -> tuple[Ints, list[str]]:
    """Return the most frequent true class of each vessel (the lowest if tied), and the vessels whose rows disagree.

    Vessels are in order of first appearance, as in `pool_by_vessel`.
    """
    labels_by_vessel: dict[str, list[int]] = {}
    for vessel, label in zip(vessels, truth.tolist(), strict=True):
        labels_by_vessel.setdefault(vessel, []).append(label)
    labels = [max(sorted(set(vessel_labels)), key=vessel_labels.count) for vessel_labels in labels_by_vessel.values()]
    return np.array(labels, dtype=np.int64), [
        vessel for vessel, vessel_labels in labels_by_vessel.items() if len(set(vessel_labels)) > 1
    ]


def compute_calibration(
    truth: Ints, probabilities: Floats, bins: int = DEFAULT_BINS
) -> tuple[float, list[CalibrationBin]]:
    """Return the expected calibration error of the most probable class, and its bins (equal widths).

    The error is the mean over rows of `|confidence - accuracy|` of the row's bin (Naeini et al., AAAI 2015; Guo et al.,
    arXiv 1706.04599, equation 3). Empty bins are left out.
    """
    confidence = probabilities.max(1)
    correct = probabilities.argmax(1) == truth
    bin_index = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    table = []
    for index in range(bins):
        in_bin = bin_index == index
        if rows := int(in_bin.sum()):
            mean_confidence, accuracy = float(confidence[in_bin].mean()), float(correct[in_bin].mean())
            table.append(CalibrationBin(index / bins, (index + 1) / bins, rows, mean_confidence, accuracy))
    error = sum(row.rows * abs(row.confidence - row.accuracy) for row in table) / len(truth)
    return error, table


def bootstrap_intervals(
    truth: Ints, predicted: Ints, classes: int, rounds: int = 1000, seed: int = 0
) -> dict[str, ConfidenceInterval]:
    """Return accuracy and macro-F1 with their 95 % percentile bootstrap interval (Efron and Tibshirani 1993, ch. 13).

    Rows are resampled with replacement: pass vessels, not segments, which are not independent of each other.

    Args:
        truth: `N` true classes.
        predicted: `N` predicted classes.
        classes: number of classes.
        rounds: number of resamples.
        seed: seed of the resampling.
    """
    cell = truth * classes + predicted
    counts = np.bincount(cell, minlength=classes * classes)
    # Resampling N rows with replacement is a multinomial sample of N cells of the confusion matrix.
    samples = np.random.default_rng(seed).multinomial(len(cell), counts / counts.sum(), size=rounds)
    intervals = {}
    for name, values in _summarize_matrices(samples.reshape(rounds, classes, classes)).items():
        value = _summarize_matrices(counts.reshape(1, classes, classes))[name][0]
        low, high = np.quantile(values, (0.025, 0.975))
        intervals[name] = ConfidenceInterval(float(value), float(low), float(high))
    return intervals


def _summarize_matrices(matrices: Ints) -> dict[str, Floats]:
    _, _, f1, present = _per_class_scores(matrices)
    hits = np.diagonal(matrices, axis1=-2, axis2=-1).sum(-1)
    return {
        "accuracy": hits / matrices.sum((-1, -2)),
        "macro_f1": (f1 * present).sum(-1) / present.sum(-1),
    }


def mcnemar_test(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> tuple[int, int, float]:
    """Return how often only the first and only the second was correct, and the exact two-sided p value.

    McNemar's test on paired rows (Dietterich 1998, Neural Computation 10(7)), binomial with p = 1/2.
    """
    from math import comb

    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    rows = only_first + only_second
    tail = sum(comb(rows, k) for k in range(min(only_first, only_second) + 1)) / 2**rows
    return only_first, only_second, min(1.0, 2 * tail)


def abstention_table(truth: Ints, probabilities: Floats, thresholds: Sequence[float]) -> list[dict[str, float]]:
    """Return for each threshold the fraction of rows with at least that confidence, and their accuracy."""
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == truth
    rows = []
    for threshold in thresholds:
        answered = confidence >= threshold
        accuracy = float(correct[answered].mean()) if answered.any() else 0.0
        rows.append({"threshold": threshold, "answered": float(answered.mean()), "accuracy": accuracy})
    return rows


ABSTAIN_THRESHOLDS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Confidence thresholds of the abstention table."""


@dataclass(frozen=True)
class VesselEvaluation:
    """Scores of one set of rows. The probabilities of a vessel are the geometric mean over its segments."""

    segments: ClassificationScores
    vessels: ClassificationScores
    intervals: dict[str, ConfidenceInterval]
    segment_calibration: tuple[float, list[CalibrationBin]]
    vessel_calibration: tuple[float, list[CalibrationBin]]
    abstention: list[dict[str, float]]
    conflicting_vessels: tuple[str, ...]
    """Vessels whose rows have different true classes; the most frequent one is used."""
    correct_by_vessel: dict[str, bool]
    """Vessel -> predicted correctly; for paired tests."""

    def as_json(self) -> dict[str, Any]:
        """Return all numbers."""
        calibration = {}
        for level, (error, table) in (("segment", self.segment_calibration), ("vessel", self.vessel_calibration)):
            rows = [{name: round(value, 4) for name, value in vars(entry).items()} for entry in table]
            calibration[level] = {"expected_calibration_error": round(error, 4), "bins": rows}
        return {
            "vessel": self.vessels.as_json(),
            "segment": self.segments.as_json(),
            "interval_95_over_vessels": {name: entry.as_json() for name, entry in self.intervals.items()},
            "calibration": calibration,
            "abstaining": [{name: round(value, 4) for name, value in row.items()} for row in self.abstention],
        }


def evaluate_predictions(rows: Predictions, bootstrap: int = 1000, seed: int = 0) -> VesselEvaluation:
    """Evaluate at both levels; the intervals resample vessels, because segments of one vessel are correlated."""
    names = rows.classes
    vessels, probabilities = pool_by_vessel(rows.probabilities, rows.vessels)
    truth, conflicting = find_majority_truth(rows.truth, rows.vessels)
    predicted = probabilities.argmax(1)
    return VesselEvaluation(
        segments=compute_scores(rows.truth, rows.probabilities.argmax(1), names),
        vessels=compute_scores(truth, predicted, names),
        intervals=bootstrap_intervals(truth, predicted, len(names), bootstrap, seed),
        segment_calibration=compute_calibration(rows.truth, rows.probabilities),
        vessel_calibration=compute_calibration(truth, probabilities),
        abstention=abstention_table(truth, probabilities, ABSTAIN_THRESHOLDS),
        conflicting_vessels=tuple(conflicting),
        correct_by_vessel=dict(zip(vessels, (predicted == truth).tolist(), strict=True)),
    )


def is_inside_box(positions: NDArray[np.float64], box: tuple[float, float, float, float]) -> NDArray[np.bool_]:
    """Return which of `N x 2` positions (degrees north, east) are in (south, north, west, east); NaN is outside."""
    south, north, west, east = box
    lat, lon = positions[:, 0], positions[:, 1]
    between = (lon >= west) & (lon <= east) if west <= east else (lon >= west) | (lon <= east)
    result: NDArray[np.bool_] = (lat >= south) & (lat <= north) & between
    return result
