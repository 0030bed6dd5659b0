"""Boosted trees on the numbers of a sequence, beside the network: fitted by scikit-learn, kept and asked without it.

Trees split single numbers at thresholds and so see what a smooth network misses (Grinsztajn et al., arXiv 2207.08815);
the mean of both is better than the network alone (docs/dev/LOG.md). A saved forest is plain arrays in a safetensors
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

FILE, VESSELS = "forest.safetensors", "vessel_forest.safetensors"
"""The trees on the numbers of a segment; those on the numbers of a vessel."""
Floats = NDArray[np.float64]
ROWS = 512
"""Rows that are asked at once: bounds the memory to rows x trees places."""


@dataclass(frozen=True)
class Growth:
    """How trees grow: small, few numbers a split, slowly, because there are many segments but few vessels.

    Chosen by 5-fold cross-validation over vessels (docs/dev/LOG.md).
    """

    rate: float
    leaves: int
    least: int
    """Rows in a leaf."""
    numbers: float
    """Share of the numbers that a split may choose from."""
    ridge: float = 5.0
    """L2 on the scores of the leaves."""
    bins: int = 255
    """Values of a number that a split tells apart."""


SEGMENTS = Growth(rate=0.05, leaves=15, least=30, numbers=0.3)
PLACES = Growth(rate=0.07, leaves=8, least=30, numbers=0.3, bins=63)
"""Of segments that say where they are: fine values of a place name single vessels."""
BY_VESSEL = Growth(rate=0.06, leaves=8, least=10, numbers=0.15)


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

    base: Floats
    root: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: Floats
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    missing_left: NDArray[np.bool_]
    value: Floats

    def probabilities(self, numbers: NDArray[Any]) -> Floats:
        """Return `n x C` from `n x F` numbers; NaN: not known."""
        blocks = [self._scores(numbers[at : at + ROWS]) for at in range(0, len(numbers), ROWS)]
        scores = np.concatenate(blocks) if blocks else np.zeros((0, len(self.base)))
        shares = np.exp(scores - scores.max(1, keepdims=True))
        result: Floats = shares / shares.sum(1, keepdims=True)
        return result

    def _scores(self, numbers: NDArray[Any]) -> Floats:
        numbers = numbers.astype(np.float64)
        rows = np.arange(len(numbers))[:, None]
        place = np.repeat(self.root[None], len(numbers), axis=0)
        while (inner := self.feature[place] >= 0).any():
            known = numbers[rows, np.maximum(self.feature[place], 0)]
            left = np.where(np.isnan(known), self.missing_left[place], known <= self.threshold[place])
            place = np.where(inner, np.where(left, self.left[place], self.right[place]), place)
        # The sum runs tree by tree, as in scikit-learn, so that both round alike.
        added = self.value[place].reshape(len(numbers), -1, len(self.base)).sum(1)
        scores: Floats = self.base + added
        return scores

    def as_bytes(self) -> bytes:
        """Return the content of its file."""
        from safetensors.numpy import save

        content: bytes = save({name: np.ascontiguousarray(one) for name, one in vars(self).items()})
        return content


def pooled(first: Floats, second: Floats, share: float) -> Floats:
    """Return the geometric mean of `n x C` probabilities in which the second count `share`, summing to one."""
    logs = [np.log(np.maximum(one, 1e-12)) for one in (first, second)]
    scores = np.exp((1 - share) * logs[0] + share * logs[1])
    result: Floats = scores / scores.sum(1, keepdims=True)
    return result


def mixed(network: Floats, trees: Floats, share: float) -> Floats:
    """Return the mean of `n x C` probabilities in which the trees count `share`; NaN stays NaN."""
    return (1 - share) * network + share * trees


def even(groups: Sequence[str]) -> Floats:
    """Return weights of mean one under which every group (vessel) counts the same, however many rows it has."""
    place: dict[str, int] = {}
    group = np.array([place.setdefault(one, len(place)) for one in groups], dtype=np.int64)
    weights: Floats = 1.0 / np.bincount(group)[group]
    return weights / weights.mean()


def load(folder: Path, name: str = FILE) -> Forest:
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


def fit(
    numbers: NDArray[Any],
    labels: NDArray[np.int64],
    weights: Floats,
    classes: int,
    rounds: int,
    seed: int = 0,
    growth: Growth = SEGMENTS,
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
        raise ConfigError("trees need scikit-learn", "pip install 'anabatic[trajectory]', or head.trees 0") from error
    there = np.unique(labels)
    if len(there) < 2:
        raise DataError(f"{len(labels)} rows of {len(there)} class train the trees", "give rows of several classes")
    model = HistGradientBoostingClassifier(
        max_iter=rounds,
        learning_rate=growth.rate,
        max_leaf_nodes=growth.leaves,
        min_samples_leaf=growth.least,
        l2_regularization=growth.ridge,
        max_features=growth.numbers,
        max_bins=growth.bins,
        early_stopping=False,
        random_state=seed,
    )
    # scikit-learn 1.9 (binning.py, _find_binning_thresholds) fails on what no row knows; a constant splits none.
    unknown = np.isnan(numbers).all(axis=0)
    model.fit(np.where(unknown, 0.0, numbers), labels, sample_weight=weights)
    found = _export(model, there, classes)
    probe = numbers[:: max(1, len(numbers) // 200)]
    ours, theirs = found.probabilities(probe)[:, there], model.predict_proba(probe)
    if np.abs(ours - theirs).max() > 1e-9:
        raise Failure(f"trees copied from scikit-learn differ by {np.abs(ours - theirs).max():.2g}", "report this")
    return found


def _export(model: Any, there: NDArray[np.int64], classes: int) -> Forest:
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
