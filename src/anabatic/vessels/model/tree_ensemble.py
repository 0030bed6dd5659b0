"""Tree ensembles next to the network of a classifier: fitted before its training, used in every evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from anabatic.config.vessels.train import ClassifyTrainJob
from anabatic.core import log
from anabatic.core.formatting import format_duration
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.models.classifier import ClassifierDescription
from anabatic.vessels.model import forest
from anabatic.vessels.model.daily_features import aggregate_by_day, number_days
from anabatic.vessels.model.forest import Forest
from anabatic.vessels.words.segments import Segment


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
    job: ClassifyTrainJob, train: SequenceDataset, rows: Sequence[Segment], description: ClassifierDescription
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
    trees: TreeEnsemble, valid: SequenceDataset, rows: Sequence[Segment], description: ClassifierDescription
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
