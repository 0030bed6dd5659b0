"""Baselines: the most frequent class, and boosted trees on kinematic features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError
from anabatic.vessels.model import forest
from anabatic.vessels.words.kinematic_features import FEATURE_NAMES
from anabatic.vessels.words.segments import Segment

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
