"""Evaluation of one set of predictions, per segment and per vessel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.vessels.metrics import classification
from anabatic.vessels.metrics.classification import CalibrationBin, ClassificationScores, ConfidenceInterval
from anabatic.vessels.metrics.predictions import Predictions

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
    vessels, probabilities = classification.pool_by_vessel(rows.probabilities, rows.vessels)
    truth, conflicting = classification.find_majority_truth(rows.truth, rows.vessels)
    predicted = probabilities.argmax(1)
    return VesselEvaluation(
        segments=classification.compute_scores(rows.truth, rows.probabilities.argmax(1), names),
        vessels=classification.compute_scores(truth, predicted, names),
        intervals=classification.bootstrap_intervals(truth, predicted, len(names), bootstrap, seed),
        segment_calibration=classification.compute_calibration(rows.truth, rows.probabilities),
        vessel_calibration=classification.compute_calibration(truth, probabilities),
        abstention=classification.abstention_table(truth, probabilities, ABSTAIN_THRESHOLDS),
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
