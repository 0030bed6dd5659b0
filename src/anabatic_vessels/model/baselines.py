"""Baselines: the most frequent class, and tree ensembles on kinematic and daily features."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_duration
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic_vessels.config.train import ClassifyTrainJob
from anabatic_vessels.io.description import TrajectoryDescription
from anabatic_vessels.model import forest
from anabatic_vessels.model.forest import Forest
from anabatic_vessels.words.kinematic_features import FEATURE_NAMES
from anabatic_vessels.words.segments import Segment

BOOSTING_ROUNDS = 250
"""Rounds of boosting."""


def predict_majority(train: NDArray[np.int64], rows: int, classes: int) -> NDArray[np.float64]:
    """Return `rows x classes` probabilities: the class frequencies in `train`, the same for every row."""
    frequencies = np.bincount(train, minlength=classes) / max(1, len(train))
    return np.repeat(frequencies[None], rows, axis=0)


def fit_and_predict_trees(
    train: Sequence[Segment], test: Sequence[Segment], classes: int, seed: int = 0, names: Sequence[str] = ()
) -> NDArray[np.float64]:
    """Fit gradient-boosted trees on the features of `train`; return probabilities of `test`, `len(test) x classes`.

    Missing values are not imputed. Every vessel has the same weight, however many segments it has.

    Args:
        names: names of the features to use; default: all.

    Raises:
        ConfigError: scikit-learn is missing.
        DataError: rows have no features, `train` has one class only, or a vessel is on both sides.
    """
    shared = {row.vessel for row in train} & {row.vessel for row in test}
    if shared:
        raise DataError(
            f"{len(shared)} vessels both train and test the baseline, such as {min(shared)}", "leave them out"
        )
    labelled = [row for row in train if row.label is not None]
    truth = np.array([row.label for row in labelled], dtype=np.int64)
    if len(set(truth.tolist())) < 2:
        raise DataError(f"{len(labelled)} rows of fewer than two classes train the baseline", "give more vessels")
    weights = forest.weigh_groups_equally([row.vessel for row in labelled])
    columns = [FEATURE_NAMES.index(name) for name in names or FEATURE_NAMES]
    trees = forest.fit_forest(stack_features(labelled)[:, columns], truth, weights, classes, BOOSTING_ROUNDS, seed)
    return trees.predict_probabilities(stack_features(test)[:, columns])


def stack_features(rows: Sequence[Segment]) -> NDArray[np.float32]:
    """Return the features of the rows, `N x F`.

    Raises:
        DataError: a row has no features.
    """
    incomplete = next((row for row in rows if row.features is None), None)
    if incomplete is not None:
        raise DataError(
            f"{incomplete.row_description}: no `features`",
            "give the AIS table itself, or rows of `anabatic classify words`",
        )
    return np.array([row.features for row in rows], dtype=np.float32)


@dataclass(frozen=True)
class TreeEnsemble:
    """The trees next to the network.

    Attributes:
        segment_forest: trees on the features of each segment, or None.
        vessel_forest: trees on the features of a vessel's day, or None.
    """

    segment_forest: Forest | None = None
    vessel_forest: Forest | None = None

    @property
    def file_contents(self) -> dict[str, str | bytes]:
        """File name in the model folder -> content."""
        forests = {forest.FOREST_FILE: self.segment_forest, forest.VESSEL_FOREST_FILE: self.vessel_forest}
        return {name: trees.to_bytes() for name, trees in forests.items() if trees is not None}


def fit_trees(
    job: ClassifyTrainJob, train: SequenceDataset, rows: Sequence[Segment], description: TrajectoryDescription
) -> TreeEnsemble:
    """Fit the trees of the job on the training segments. Every vessel has the same weight.

    Args:
        rows: the training segments.
    """
    if train.feature_tensor is None or not job.head.trees:
        return TreeEnsemble()
    started = time.monotonic()
    features, classes, head = np.asarray(train.feature_tensor), len(description.classes), job.head
    weights = forest.weigh_groups_equally([row.vessel for row in rows])
    growth = forest.POSITION_GROWTH if "location" in head.features else forest.SEGMENT_GROWTH
    segments = forest.fit_forest(features, train.class_labels, weights, classes, head.trees, job.seed, growth)
    _log_forest("numbers of each segment", segments, features, started)
    if not head.vessel_trees:
        return TreeEnsemble(segments)
    started = time.monotonic()
    groups = number_days([row.vessel for row in rows], [row.start for row in rows])
    first_rows = np.unique(groups, return_index=True)[1]
    weights = forest.weigh_groups_equally([rows[index].vessel for index in first_rows])
    day_features = aggregate_by_day(features, groups)
    labels = train.class_labels[first_rows]
    vessels = forest.fit_forest(
        day_features, labels, weights, classes, head.vessel_trees, job.seed, forest.VESSEL_GROWTH
    )
    _log_forest("numbers of each vessel", vessels, day_features, started)
    return TreeEnsemble(segments, vessels)


def _log_forest(description: str, trees: Forest, features: np.ndarray, started: float) -> None:
    log.info(
        f"trees on the {description}: {len(trees.root):,} with {len(trees.value):,} nodes,"
        f" {features.shape[1]} numbers of"
        f" {len(features):,} rows, in {format_duration(time.monotonic() - started)}"
    )


def make_probability_mixer(
    trees: TreeEnsemble, valid: SequenceDataset, rows: Sequence[Segment], description: TrajectoryDescription
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that mixes the network's probabilities of the held-out segments `rows` with the trees'."""
    if trees.segment_forest is None or valid.feature_tensor is None or not rows:
        return lambda probabilities: probabilities
    features = np.asarray(valid.feature_tensor)
    segment_probabilities = trees.segment_forest.predict_probabilities(features)
    if trees.vessel_forest is None:
        return lambda probabilities: forest.mix_probabilities(
            probabilities, segment_probabilities, description.trees_share
        )
    groups = number_days([row.vessel for row in rows], [row.start for row in rows])
    vessel_probabilities = trees.vessel_forest.predict_probabilities(aggregate_by_day(features, groups))[groups]
    return lambda probabilities: forest.mix_geometric(
        forest.mix_probabilities(probabilities, segment_probabilities, description.trees_share),
        vessel_probabilities,
        description.vessel_share,
    )


DAY_SECONDS = 86_400
"""Seconds per row, counted from a vessel's first segment: a month of a vessel is not aggregated to one row."""


def number_days(vessels: Sequence[str], starts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return the day id of each of `n` segments: consecutive numbers from 0, one per vessel and day.

    Args:
        vessels: `n` ids.
        starts: `n` unix seconds; None: unknown, assigned to the first day of the vessel.
    """
    vessel_ids = np.unique(np.asarray(vessels, dtype=str), return_inverse=True)[1]
    time = np.array([np.nan if start is None else float(start) for start in starts], dtype=np.float64)
    first_start = np.full(int(vessel_ids.max(initial=-1)) + 1, np.inf)
    np.fmin.at(first_start, vessel_ids, time)
    day = np.nan_to_num(np.floor((time - first_start[vessel_ids]) / DAY_SECONDS))
    day_ids = np.unique(np.stack([vessel_ids, day], axis=1), axis=0, return_inverse=True)[1]
    return day_ids.reshape(-1).astype(np.int64)


def aggregate_by_day(features: NDArray[np.float32], groups: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return mean, minimum and maximum of each feature in each group.

    Trees on segments do not use them: repeated on every segment of a vessel they would identify the vessel.

    Args:
        features: `n x F`; NaN values are left out.
        groups: `n`, from 0.

    Returns:
        `g x 3F`: all means, then the minima, then the maxima; NaN if unknown in all segments of the group.
    """
    is_known = np.isfinite(features)
    shape = (int(groups.max(initial=-1)) + 1, features.shape[1])
    sums, counts = np.zeros(shape), np.zeros(shape)
    minima, maxima = np.full(shape, np.inf), np.full(shape, -np.inf)
    np.add.at(sums, groups, np.where(is_known, features, 0.0))
    np.add.at(counts, groups, is_known)
    np.minimum.at(minima, groups, np.where(is_known, features, np.inf))
    np.maximum.at(maxima, groups, np.where(is_known, features, -np.inf))
    result = np.concatenate([sums / np.maximum(counts, 1), minima, maxima], axis=1)
    return np.where(np.tile(counts > 0, 3), result, np.nan).astype(np.float32)
