"""Boosted trees on the numbers of a sequence, beside the network: fitted by scikit-learn, kept and asked without it.

Trees split single numbers at thresholds and so see what a smooth network misses (Grinsztajn et al., arXiv 2207.08815);
the mean of both is better than the network alone (docs/dev). A saved forest is plain arrays in a safetensors
file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import ConfigError, DataError, Failure

FOREST_FILE, VESSEL_FOREST_FILE = "forest.safetensors", "vessel_forest.safetensors"
"""The trees on the numbers of a segment; those on the numbers of a vessel."""
FloatArray = NDArray[np.float64]
ROWS_PER_CHUNK = 512
"""Rows that are asked at once: bounds the memory to rows x trees places."""


@dataclass(frozen=True)
class GrowthSettings:
    """How trees grow: small, few numbers a split, slowly, because there are many segments but few vessels.

    Chosen by 5-fold cross-validation over vessels (docs/dev).
    """

    learning_rate: float
    max_leaves: int
    min_leaf_rows: int
    """Rows in a leaf."""
    feature_fraction: float
    """Share of the numbers that a split may choose from."""
    l2_penalty: float = 5.0
    """L2 on the scores of the leaves."""
    max_bins: int = 255
    """Values of a number that a split separates."""


SEGMENT_GROWTH = GrowthSettings(learning_rate=0.05, max_leaves=15, min_leaf_rows=30, feature_fraction=0.3)
POSITION_GROWTH = GrowthSettings(learning_rate=0.07, max_leaves=8, min_leaf_rows=30, feature_fraction=0.3, max_bins=63)
"""Of segments that say where they are: fine values of a place name single vessels."""
VESSEL_GROWTH = GrowthSettings(learning_rate=0.06, max_leaves=8, min_leaf_rows=10, feature_fraction=0.15)


@dataclass(frozen=True)
class Forest:
    """`t` trees with `m` nodes in all; tree `k` adds to the score of class `k % C`.

    Attributes:
        base: `C` scores before the first tree.
        root: `t` places of the roots among the nodes.
        feature: `m` columns that are compared; -1: a leaf.
        threshold: `m` numbers; smaller or equal goes left.
        left: `m` places; right: `m` places.
        missing_left: `m`, where NaN goes.
        value: `m` scores of the leaves.
    """

    base: FloatArray
    root: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: FloatArray
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    missing_left: NDArray[np.bool_]
    value: FloatArray

    def predict_probabilities(self, numbers: NDArray[Any]) -> FloatArray:
        """Return `n x C` from `n x F` numbers; NaN: not known."""
        blocks = [
            self._predict_scores(numbers[at : at + ROWS_PER_CHUNK]) for at in range(0, len(numbers), ROWS_PER_CHUNK)
        ]
        scores = np.concatenate(blocks) if blocks else np.zeros((0, len(self.base)))
        shares = np.exp(scores - scores.max(1, keepdims=True))
        result: FloatArray = shares / shares.sum(1, keepdims=True)
        return result

    def _predict_scores(self, numbers: NDArray[Any]) -> FloatArray:
        numbers = numbers.astype(np.float64)
        rows = np.arange(len(numbers))[:, None]
        place = np.repeat(self.root[None], len(numbers), axis=0)
        while (inner := self.feature[place] >= 0).any():
            known = numbers[rows, np.maximum(self.feature[place], 0)]
            left = np.where(np.isnan(known), self.missing_left[place], known <= self.threshold[place])
            place = np.where(inner, np.where(left, self.left[place], self.right[place]), place)
        # The sum runs tree by tree, as in scikit-learn, so that both round alike.
        added = self.value[place].reshape(len(numbers), -1, len(self.base)).sum(1)
        scores: FloatArray = self.base + added
        return scores

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        from safetensors.numpy import save

        content: bytes = save({name: np.ascontiguousarray(one) for name, one in vars(self).items()})
        return content


def mix_geometric(first: FloatArray, second: FloatArray, share: float) -> FloatArray:
    """Return the geometric mean of `n x C` probabilities in which the second count `share`, summing to one."""
    logs = [np.log(np.maximum(one, 1e-12)) for one in (first, second)]
    scores = np.exp((1 - share) * logs[0] + share * logs[1])
    result: FloatArray = scores / scores.sum(1, keepdims=True)
    return result


def mix_probabilities(network: FloatArray, trees: FloatArray, share: float) -> FloatArray:
    """Return the mean of `n x C` probabilities in which the trees count `share`; NaN stays NaN."""
    return (1 - share) * network + share * trees


def weigh_groups_equally(groups: Sequence[str]) -> FloatArray:
    """Return weights of mean one under which every group (vessel) counts the same, however many rows it has."""
    place: dict[str, int] = {}
    group = np.array([place.setdefault(one, len(place)) for one in groups], dtype=np.int64)
    weights: FloatArray = 1.0 / np.bincount(group)[group]
    return weights / weights.mean()


def load_forest(folder: Path, name: str = FOREST_FILE) -> Forest:
    """Read a forest of a folder.

    Raises:
        DataError: there is none, or it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return Forest(**load_file(folder / name))
    except (OSError, SafetensorError, TypeError) as error:
        raise DataError(f"{folder / name}: no forest: {error}", "train the classifier again") from error


def fit_forest(
    numbers: NDArray[Any],
    labels: NDArray[np.int64],
    weights: FloatArray,
    classes: int,
    rounds: int,
    seed: int = 0,
    growth: GrowthSettings = SEGMENT_GROWTH,
) -> Forest:
    """Fit `rounds` trees for each class on `n x F` numbers.

    Args:
        numbers: `n x F`; NaN: not known.
        labels: `n`.
        weights: `n`, what each row counts.
        classes: number of classes.
        rounds: of boosting.
        seed: of the numbers that each split may choose from.
        growth: of each tree.

    Raises:
        ConfigError: scikit-learn is missing.
        DataError: fewer than two classes occur.
        Failure: this version of scikit-learn keeps its trees otherwise.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier
    except ImportError as error:
        raise ConfigError("trees need scikit-learn", "pip install 'anabatic[vessels]', or head.trees 0") from error
    there = np.unique(labels)
    if len(there) < 2:
        raise DataError(f"{len(labels)} rows of {len(there)} class train the trees", "give rows of several classes")
    model = HistGradientBoostingClassifier(
        max_iter=rounds,
        learning_rate=growth.learning_rate,
        max_leaf_nodes=growth.max_leaves,
        min_samples_leaf=growth.min_leaf_rows,
        l2_regularization=growth.l2_penalty,
        max_features=growth.feature_fraction,
        max_bins=growth.max_bins,
        early_stopping=False,
        random_state=seed,
    )
    # scikit-learn 1.9 (binning.py, _find_binning_thresholds) fails on what no row knows; a constant splits none.
    unknown = np.isnan(numbers).all(axis=0)
    model.fit(np.where(unknown, 0.0, numbers), labels, sample_weight=weights)
    found = _copy_trees(model, there, classes)
    probe = numbers[:: max(1, len(numbers) // 200)]
    ours, theirs = found.predict_probabilities(probe)[:, there], model.predict_proba(probe)
    if np.abs(ours - theirs).max() > 1e-9:
        raise Failure(f"trees copied from scikit-learn differ by {np.abs(ours - theirs).max():.2g}", "report this")
    return found


def _copy_trees(model: Any, there: NDArray[np.int64], classes: int) -> Forest:
    """Copy the trees; a class that is not `there` never wins. Of two classes only the second has trees."""
    base = np.full(classes, -1e9)
    base[there] = 0.0
    start = np.ravel(model._baseline_prediction)
    base[there[-len(start) :]] = start
    nodes: list[NDArray[Any]] = []
    roots: list[int] = []
    size = 0
    for trees in model._predictors:
        by_class = dict(zip(there[-len(trees) :].tolist(), trees, strict=True))
        for label in range(classes):
            tree = by_class.get(label)
            copied = tree.nodes if tree is not None else np.zeros(1, model._predictors[0][0].nodes.dtype)
            copied = copied.copy()
            copied["is_leaf"] |= tree is None
            copied["left"] += size
            copied["right"] += size
            roots.append(size)
            nodes.append(copied)
            size += len(copied)
    every = np.concatenate(nodes)
    leaf = every["is_leaf"].astype(bool)
    return Forest(
        base=base,
        root=np.array(roots, dtype=np.int64),
        feature=np.where(leaf, -1, every["feature_idx"]).astype(np.int64),
        threshold=every["num_threshold"].astype(np.float64),
        left=every["left"].astype(np.int64),
        right=every["right"].astype(np.int64),
        missing_left=every["missing_go_to_left"].astype(bool),
        value=np.where(leaf, every["value"], 0.0),
    )
