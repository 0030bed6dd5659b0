"""How good are predicted classes: per segment and per vessel, with calibration and an interval over vessels.

Everything starts from `N x C` probabilities and `N` true classes; rows are segments or vessels. Definitions follow
scikit-learn (model_evaluation guide) with `zero_division=0`: macro-F1 is the mean over classes that are true or
predicted somewhere, balanced accuracy the mean recall over classes that are true somewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """A share and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """Return it rounded to four places."""
        return {"value": round(self.value, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


@dataclass(frozen=True)
class CalibrationBin:
    """Rows whose confidence lies in `(low, high]`: how sure the model was, and how often it was right."""

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class ClassificationScores:
    """One set of predictions measured. `confusion` is `C x C`, true class in rows."""

    rows: int
    accuracy: float
    macro_f1: float
    balanced_accuracy: float
    classes: tuple[ClassScore, ...]
    confusion: Ints

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, rounded to four places."""
        table = {
            one.name: {
                "precision": round(one.precision, 4),
                "recall": round(one.recall, 4),
                "f1": round(one.f1, 4),
                "support": one.support,
            }
            for one in self.classes
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
    """Measure `N` predicted against `N` true classes.

    Args:
        truth: `N` positions in `classes`.
        predicted: `N` positions in `classes`.
        classes: `C` names.

    Raises:
        ValueError: there are no rows.
    """
    if not len(truth):
        raise ValueError("no rows to score")
    matrix = confusion_matrix(truth, predicted, len(classes))
    precision, recall, f1, present = _per_class_scores(matrix)
    support = matrix.sum(1)
    table = tuple(
        ClassScore(name, float(precision[at]), float(recall[at]), float(f1[at]), int(support[at]))
        for at, name in enumerate(classes)
    )
    return ClassificationScores(
        rows=len(truth),
        accuracy=float(np.trace(matrix) / matrix.sum()),
        macro_f1=float(f1[present].mean()),
        balanced_accuracy=float(recall[support > 0].mean()),
        classes=table,
        confusion=matrix,
    )


def confusion_matrix(truth: Ints, predicted: Ints, classes: int) -> Ints:
    """Return `C x C` counts: row = true class, column = predicted class."""
    counted: Ints = np.bincount(truth * classes + predicted, minlength=classes * classes).reshape(classes, classes)
    return counted


def _per_class_scores(matrix: Ints) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
    """Return precision, recall, F1 (`... x C` each) of `... x C x C` counts, and which classes occur."""
    hits = np.diagonal(matrix, axis1=-2, axis2=-1).astype(float)
    true, said = matrix.sum(-1), matrix.sum(-2)
    precision = hits / np.maximum(said, 1)
    recall = hits / np.maximum(true, 1)
    f1 = 2 * hits / np.maximum(true + said, 1)
    return precision, recall, f1, (true + said) > 0


MIN_PROBABILITY = 1e-6
"""Least probability that a segment gives a class where a vessel's are put together."""


def pool_by_vessel(probabilities: Floats, vessels: Sequence[str]) -> tuple[list[str], Floats]:
    """Return the vessels in order of first appearance, and the geometric mean of their segments' probabilities,
    `V x C`, which sum to one.

    A logarithmic opinion pool (Genest and Zidek, Statistical Science 1986): a class that some segments rule out is
    unlikely, whatever the others say. No segment alone makes a class less likely than `MIN_PROBABILITY`.
    """
    place: dict[str, int] = {}
    group = np.array([place.setdefault(vessel, len(place)) for vessel in vessels], dtype=np.int64)
    sums = np.zeros((len(place), probabilities.shape[1]))
    np.add.at(sums, group, np.log(np.maximum(probabilities, MIN_PROBABILITY)))
    counts = np.bincount(group, minlength=len(place))
    means = np.exp(sums / counts[:, None])
    return list(place), means / means.sum(1, keepdims=True)


def find_majority_truth(truth: Ints, vessels: Sequence[str]) -> tuple[Ints, list[str]]:
    """Return the most frequent true class of each vessel (lowest of equals), and the vessels whose rows disagree.

    Vessels are in order of first appearance, as in `pool_by_vessel`.
    """
    seen: dict[str, list[int]] = {}
    for vessel, label in zip(vessels, truth.tolist(), strict=True):
        seen.setdefault(vessel, []).append(label)
    labels = [max(sorted(set(found)), key=found.count) for found in seen.values()]
    return np.array(labels, dtype=np.int64), [vessel for vessel, found in seen.items() if len(set(found)) > 1]


def compute_calibration(
    truth: Ints, probabilities: Floats, bins: int = DEFAULT_BINS
) -> tuple[float, list[CalibrationBin]]:
    """Return the expected calibration error of the most probable class, and its bins (equal widths).

    The error is the mean over rows of `|confidence - accuracy|` of the row's bin (Naeini et al., AAAI 2015; Guo et al.,
    arXiv 1706.04599, equation 3). Empty bins are left out.
    """
    confidence = probabilities.max(1)
    right = probabilities.argmax(1) == truth
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    table = []
    for at in range(bins):
        inside = place == at
        if rows := int(inside.sum()):
            sure, hit = float(confidence[inside].mean()), float(right[inside].mean())
            table.append(CalibrationBin(at / bins, (at + 1) / bins, rows, sure, hit))
    error = sum(one.rows * abs(one.confidence - one.accuracy) for one in table) / len(truth)
    return error, table


def bootstrap_intervals(
    truth: Ints, predicted: Ints, classes: int, rounds: int = 1000, seed: int = 0
) -> dict[str, ConfidenceInterval]:
    """Return accuracy and macro-F1 with their 95 % percentile bootstrap interval (Efron and Tibshirani 1993, ch. 13).

    Rows are drawn with replacement: pass vessels, not segments, which are not independent of each other.

    Args:
        truth: `N` true classes.
        predicted: `N` predicted classes.
        classes: number of classes.
        rounds: number of resamples.
        seed: of the draws.
    """
    cell = truth * classes + predicted
    counts = np.bincount(cell, minlength=classes * classes)
    # Drawing N rows with replacement is drawing N cells of the confusion matrix by their shares.
    drawn = np.random.default_rng(seed).multinomial(len(cell), counts / counts.sum(), size=rounds)
    found = {}
    for name, values in _summarize_matrices(drawn.reshape(rounds, classes, classes)).items():
        value = _summarize_matrices(counts.reshape(1, classes, classes))[name][0]
        low, high = np.quantile(values, (0.025, 0.975))
        found[name] = ConfidenceInterval(float(value), float(low), float(high))
    return found


def _summarize_matrices(matrices: Ints) -> dict[str, Floats]:
    _, _, f1, present = _per_class_scores(matrices)
    hits = np.diagonal(matrices, axis1=-2, axis2=-1).sum(-1)
    return {
        "accuracy": hits / matrices.sum((-1, -2)),
        "macro_f1": (f1 * present).sum(-1) / present.sum(-1),
    }


def mcnemar_test(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> tuple[int, int, float]:
    """Return how often only the first and only the second was right, and the exact two-sided p value.

    McNemar's test on paired rows (Dietterich 1998, Neural Computation 10(7)), binomial with p = 1/2.
    """
    from math import comb

    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    rows = only_first + only_second
    tail = sum(comb(rows, k) for k in range(min(only_first, only_second) + 1)) / 2**rows
    return only_first, only_second, min(1.0, 2 * tail)


def abstention_table(truth: Ints, probabilities: Floats, thresholds: Sequence[float]) -> list[dict[str, float]]:
    """Return for each threshold the share of rows at least that sure, and the accuracy among them."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == truth
    rows = []
    for threshold in thresholds:
        kept = confidence >= threshold
        accuracy = float(right[kept].mean()) if kept.any() else 0.0
        rows.append({"threshold": threshold, "answered": float(kept.mean()), "accuracy": accuracy})
    return rows
