"""One set of predictions, measured per segment and per vessel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.vessels.metrics import classification
from anabatic.vessels.metrics.classification import CalibrationBin, ClassificationScores, ConfidenceInterval
from anabatic.vessels.metrics.predictions import Predictions

ABSTAIN_THRESHOLDS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of the table that says what abstaining costs and brings."""


@dataclass(frozen=True)
class VesselEvaluation:
    """Scores of one set of rows. A vessel's probabilities are the geometric mean of its segments'."""

    segments: ClassificationScores
    vessels: ClassificationScores
    intervals: dict[str, ConfidenceInterval]
    segment_calibration: tuple[float, list[CalibrationBin]]
    vessel_calibration: tuple[float, list[CalibrationBin]]
    abstention: list[dict[str, float]]
    conflicting_vessels: tuple[str, ...]
    """Vessels whose rows have different true classes; the most frequent counts."""
    correct_by_vessel: dict[str, bool]
    """Vessel -> predicted rightly; for paired tests."""

    def as_json(self) -> dict[str, Any]:
        """Return all numbers."""
        calibration = {}
        for level, (error, table) in (("segment", self.segment_calibration), ("vessel", self.vessel_calibration)):
            rows = [{name: round(value, 4) for name, value in vars(one).items()} for one in table]
            calibration[level] = {"expected_calibration_error": round(error, 4), "bins": rows}
        return {
            "vessel": self.vessels.as_json(),
            "segment": self.segments.as_json(),
            "interval_95_over_vessels": {name: one.as_json() for name, one in self.intervals.items()},
            "calibration": calibration,
            "abstaining": [{name: round(value, 4) for name, value in row.items()} for row in self.abstention],
        }


def evaluate_predictions(rows: Predictions, bootstrap: int = 1000, seed: int = 0) -> VesselEvaluation:
    """Measure at both levels; the intervals resample vessels, because segments of one vessel are alike."""
    names = rows.classes
    vessels, mean = classification.pool_by_vessel(rows.probabilities, rows.vessels)
    truth, torn = classification.find_majority_truth(rows.truth, rows.vessels)
    predicted = mean.argmax(1)
    return VesselEvaluation(
        segments=classification.compute_scores(rows.truth, rows.probabilities.argmax(1), names),
        vessels=classification.compute_scores(truth, predicted, names),
        intervals=classification.bootstrap_intervals(truth, predicted, len(names), bootstrap, seed),
        segment_calibration=classification.compute_calibration(rows.truth, rows.probabilities),
        vessel_calibration=classification.compute_calibration(truth, mean),
        abstention=classification.abstention_table(truth, mean, ABSTAIN_THRESHOLDS),
        conflicting_vessels=tuple(torn),
        correct_by_vessel=dict(zip(vessels, (predicted == truth).tolist(), strict=True)),
    )


def is_inside_box(places: NDArray[np.float64], box: tuple[float, float, float, float]) -> NDArray[np.bool_]:
    """Return which of `N x 2` places (degrees north, east) lie in (south, north, west, east); NaN: none."""
    south, north, west, east = box
    lat, lon = places[:, 0], places[:, 1]
    between = (lon >= west) & (lon <= east) if west <= east else (lon >= west) | (lon <= east)
    found: NDArray[np.bool_] = (lat >= south) & (lat <= north) & between
    return found
