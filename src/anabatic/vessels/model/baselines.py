"""What a model must beat: always the most frequent class, and boosted trees on kinematic numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError
from anabatic.vessels.model import forest
from anabatic.vessels.words.kinematic_features import FEATURE_NAMES
from anabatic.vessels.words.segments import Segment

BOOSTING_ROUNDS = 250
"""Of boosting."""


def predict_majority(train: NDArray[np.int64], rows: int, classes: int) -> NDArray[np.float64]:
    """Return `rows x classes` probabilities: the shares of the classes in `train`, the same for every row."""
    shares = np.bincount(train, minlength=classes) / max(1, len(train))
    return np.repeat(shares[None], rows, axis=0)


def fit_and_predict_trees(
    train: Sequence[Segment], test: Sequence[Segment], classes: int, seed: int = 0, names: Sequence[str] = ()
) -> NDArray[np.float64]:
    """Fit gradient-boosted trees on the numbers of `train` and return probabilities of `test`, `len(test) x classes`.

    Missing numbers are taken as they are. Every vessel weighs the same, however many segments it has.

    Args:
        names: of the numbers that may be used; default: all.

    Raises:
        ConfigError: scikit-learn is missing.
        DataError: rows have no numbers, `train` has one class only, or a vessel is on both sides.
    """
    both = {row.vessel for row in train} & {row.vessel for row in test}
    if both:
        raise DataError(f"{len(both)} vessels both train and test the baseline, such as {min(both)}", "leave them out")
    labelled = [row for row in train if row.label is not None]
    truth = np.array([row.label for row in labelled], dtype=np.int64)
    if len(set(truth.tolist())) < 2:
        raise DataError(f"{len(labelled)} rows of fewer than two classes train the baseline", "give more vessels")
    weights = forest.weigh_groups_equally([row.vessel for row in labelled])
    columns = [FEATURE_NAMES.index(name) for name in names or FEATURE_NAMES]
    fitted = forest.fit_forest(stack_features(labelled)[:, columns], truth, weights, classes, BOOSTING_ROUNDS, seed)
    return fitted.predict_probabilities(stack_features(test)[:, columns])


def stack_features(rows: Sequence[Segment]) -> NDArray[np.float32]:
    """Return the numbers beside the words, `N x F`.

    Raises:
        DataError: a row has none.
    """
    without = next((row for row in rows if row.features is None), None)
    if without is not None:
        raise DataError(
            f"{without.row_description}: no `features`",
            "give the AIS table itself, or rows of `anabatic classify words`",
        )
    return np.array([row.features for row in rows], dtype=np.float32)
