"""Boosted trees on the features of a sequence, next to the network: fitted by scikit-learn, stored and applied without.

Trees split single features at thresholds, which a smooth network approximates badly (Grinsztajn et al., arXiv
2207.08815); the mean of both is better than the network alone (docs/dev). A saved forest is plain arrays in a
safetensors file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.core import extras
from anabatic.core.errors import DataError, Failure

FOREST_FILE, VESSEL_FOREST_FILE = "forest.safetensors", "vessel_forest.safetensors"
"""The trees on the features of a segment; those on the features of a vessel."""
FloatArray = NDArray[np.float64]
ROWS_PER_CHUNK = 512
"""Rows per chunk of a prediction: bounds the memory to rows x trees node indices."""


@dataclass(frozen=True)
class GrowthSettings:
    """Growth of trees: small, few features per split and a low learning rate, as there are many segments but few
    vessels.

    Chosen by 5-fold cross-validation over vessels (docs/dev).
    """

    learning_rate: float
    max_leaves: int
    min_leaf_rows: int
    """Minimum rows in a leaf."""
    feature_fraction: float
    """Fraction of the features available to a split."""
    l2_penalty: float = 5.0
    """L2 penalty on the scores of the leaves."""
    max_bins: int = 255
    """Maximum bins of a feature."""


SEGMENT_GROWTH = GrowthSettings(learning_rate=0.05, max_leaves=15, min_leaf_rows=30, feature_fraction=0.3)
POSITION_GROWTH = GrowthSettings(learning_rate=0.07, max_leaves=8, min_leaf_rows=30, feature_fraction=0.3, max_bins=63)
"""For segments with location features: fine values of a position identify single vessels."""
VESSEL_GROWTH = GrowthSettings(learning_rate=0.06, max_leaves=8, min_leaf_rows=10, feature_fraction=0.15)


@dataclass(frozen=True)
class Forest:
    """`t` trees with `m` nodes in total; tree `k` adds to the score of class `k % C`.

    Attributes:
        base: `C` scores before the first tree.
        root: `t` node indices of the roots.
        feature: `m` columns to compare; -1: a leaf.
        threshold: `m` numbers; smaller or equal goes left.
        left: `m` node indices; right: `m` node indices.
        missing_left: `m`, whether NaN goes left.
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

    def predict_probabilities(self, features: NDArray[Any]) -> FloatArray:
        """Return `n x C` probabilities from `n x F` features; NaN: unknown."""
        blocks = [
            self._predict_scores(features[start : start + ROWS_PER_CHUNK])
            for start in range(0, len(features), ROWS_PER_CHUNK)
        ]
        scores = np.concatenate(blocks) if blocks else np.zeros((0, len(self.base)))
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        result: FloatArray = exponentials / exponentials.sum(1, keepdims=True)
        return result

    def _predict_scores(self, features: NDArray[Any]) -> FloatArray:
        features = features.astype(np.float64)
        rows = np.arange(len(features))[:, None]
        node = np.repeat(self.root[None], len(features), axis=0)
        while (is_split := self.feature[node] >= 0).any():
            values = features[rows, np.maximum(self.feature[node], 0)]
            left = np.where(np.isnan(values), self.missing_left[node], values <= self.threshold[node])
            node = np.where(is_split, np.where(left, self.left[node], self.right[node]), node)
        # The sum runs tree by tree, as in scikit-learn, so that both round the same way.
        leaf_sums = self.value[node].reshape(len(features), -1, len(self.base)).sum(1)
        scores: FloatArray = self.base + leaf_sums
        return scores

    def to_bytes(self) -> bytes:
        """Return the content of the forest file."""
        from safetensors.numpy import save

        content: bytes = save({name: np.ascontiguousarray(array) for name, array in vars(self).items()})
        return content


def mix_geometric(first: FloatArray, second: FloatArray, second_weight: float) -> FloatArray:
    """Return the weighted geometric mean of `n x C` probabilities, normalized; `second_weight` is that of `second`."""
    logs = [np.log(np.maximum(probabilities, 1e-12)) for probabilities in (first, second)]
    scores = np.exp((1 - second_weight) * logs[0] + second_weight * logs[1])
    result: FloatArray = scores / scores.sum(1, keepdims=True)
    return result


def mix_probabilities(network: FloatArray, trees: FloatArray, tree_weight: float) -> FloatArray:
    """Return the weighted mean of `n x C` probabilities; `tree_weight` is that of the trees. NaN stays NaN."""
    return (1 - tree_weight) * network + tree_weight * trees


def weigh_groups_equally(groups: Sequence[str]) -> FloatArray:
    """Return row weights with mean one and the same sum in every group (vessel)."""
    index_by_group: dict[str, int] = {}
    group = np.array([index_by_group.setdefault(name, len(index_by_group)) for name in groups], dtype=np.int64)
    weights: FloatArray = 1.0 / np.bincount(group)[group]
    return weights / weights.mean()


def load_forest(folder: Path, name: str = FOREST_FILE) -> Forest:
    """Load a forest from a folder.

    Raises:
        DataError: there is no forest, or it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return Forest(**load_file(folder / name))
    except (OSError, SafetensorError, TypeError) as error:
        raise DataError(f"{folder / name}: no forest: {error}", "train the classifier again") from error


def fit_forest(
    features: NDArray[Any],
    labels: NDArray[np.int64],
    weights: FloatArray,
    classes: int,
    rounds: int,
    seed: int = 0,
    growth: GrowthSettings = SEGMENT_GROWTH,
) -> Forest:
    """Fit `rounds` trees for each class on `n x F` features.

    Args:
        features: `n x F`; NaN: unknown.
        labels: `n`.
        weights: `n`, weight of each row.
        classes: number of classes.
        rounds: rounds of boosting.
        seed: seed of the features available to each split.
        growth: settings of the trees.

    Raises:
        ConfigError: scikit-learn is missing.
        DataError: fewer than two classes occur.
        Failure: the trees of this version of scikit-learn have another layout.
    """
    ensemble = extras.import_optional("sklearn.ensemble", "head.trees", "or set head.trees 0")
    present = np.unique(labels)
    if len(present) < 2:
        raise DataError(f"{len(labels)} rows of {len(present)} class train the trees", "give rows of several classes")
    model = ensemble.HistGradientBoostingClassifier(
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
    # scikit-learn 1.9 (binning.py, _find_binning_thresholds) fails on columns of NaN; a constant is never split.
    unknown = np.isnan(features).all(axis=0)
    model.fit(np.where(unknown, 0.0, features), labels, sample_weight=weights)
    fitted = _copy_trees(model, present, classes)
    probe = features[:: max(1, len(features) // 200)]
    copied, reference = fitted.predict_probabilities(probe)[:, present], model.predict_proba(probe)
    if np.abs(copied - reference).max() > 1e-9:
        raise Failure(f"trees copied from scikit-learn differ by {np.abs(copied - reference).max():.2g}", "report this")
    return fitted


def _copy_trees(model: Any, present: NDArray[np.int64], classes: int) -> Forest:
    """Copy the trees; a class that is not in `present` never wins. Of two classes only the second has trees."""
    base = np.full(classes, -1e9)
    base[present] = 0.0
    initial_scores = np.ravel(model._baseline_prediction)
    base[present[-len(initial_scores) :]] = initial_scores
    nodes: list[NDArray[Any]] = []
    roots: list[int] = []
    num_nodes = 0
    for trees in model._predictors:
        by_class = dict(zip(present[-len(trees) :].tolist(), trees, strict=True))
        for label in range(classes):
            tree = by_class.get(label)
            tree_nodes = tree.nodes if tree is not None else np.zeros(1, model._predictors[0][0].nodes.dtype)
            tree_nodes = tree_nodes.copy()
            tree_nodes["is_leaf"] |= tree is None
            tree_nodes["left"] += num_nodes
            tree_nodes["right"] += num_nodes
            roots.append(num_nodes)
            nodes.append(tree_nodes)
            num_nodes += len(tree_nodes)
    all_nodes = np.concatenate(nodes)
    leaf = all_nodes["is_leaf"].astype(bool)
    return Forest(
        base=base,
        root=np.array(roots, dtype=np.int64),
        feature=np.where(leaf, -1, all_nodes["feature_idx"]).astype(np.int64),
        threshold=all_nodes["num_threshold"].astype(np.float64),
        left=all_nodes["left"].astype(np.int64),
        right=all_nodes["right"].astype(np.int64),
        missing_left=all_nodes["missing_go_to_left"].astype(bool),
        value=np.where(leaf, all_nodes["value"], 0.0),
    )
