"""The trees beside a classifier's network: fitted before it is trained, heard in every evaluation."""

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
    """What stands beside the network.

    Attributes:
        segment_forest: on the numbers of each segment; None: there are none.
        vessel_forest: on the numbers of a vessel's day; None: there are none.
    """

    segment_forest: Forest | None = None
    vessel_forest: Forest | None = None

    @property
    def file_contents(self) -> dict[str, str | bytes]:
        """Name in the model folder -> content."""
        named = {forest.FOREST_FILE: self.segment_forest, forest.VESSEL_FOREST_FILE: self.vessel_forest}
        return {name: one.to_bytes() for name, one in named.items() if one is not None}


def fit_trees(
    job: ClassifyTrainJob, train: SequenceDataset, rows: Sequence[Segment], description: ClassifierDescription
) -> TreeEnsemble:
    """Fit the trees that the job wants on the training segments. Every vessel counts the same.

    Args:
        rows: the training segments.
    """
    if train.feature_tensor is None or not job.head.trees:
        return TreeEnsemble()
    began = time.monotonic()
    numbers, classes, head = np.asarray(train.feature_tensor), len(description.classes), job.head
    weights = forest.weigh_groups_equally([row.vessel for row in rows])
    growth = forest.POSITION_GROWTH if "location" in head.features else forest.SEGMENT_GROWTH
    segments = forest.fit_forest(numbers, train.class_labels, weights, classes, head.trees, job.seed, growth)
    _log_forest("numbers of each segment", segments, numbers, began)
    if not head.vessel_trees:
        return TreeEnsemble(segments)
    began = time.monotonic()
    groups = number_days([row.vessel for row in rows], [row.start for row in rows])
    first = np.unique(groups, return_index=True)[1]
    weights = forest.weigh_groups_equally([rows[at].vessel for at in first])
    own = aggregate_by_day(numbers, groups)
    labels = train.class_labels[first]
    vessels = forest.fit_forest(own, labels, weights, classes, head.vessel_trees, job.seed, forest.VESSEL_GROWTH)
    _log_forest("numbers of each vessel", vessels, own, began)
    return TreeEnsemble(segments, vessels)


def _log_forest(what: str, found: Forest, numbers: np.ndarray, began: float) -> None:
    log.info(
        f"trees on the {what}: {len(found.root):,} with {len(found.value):,} nodes, {numbers.shape[1]} numbers of"
        f" {len(numbers):,} rows, in {format_duration(time.monotonic() - began)}"
    )


def make_probability_mixer(
    trees: TreeEnsemble, valid: SequenceDataset, rows: Sequence[Segment], description: ClassifierDescription
) -> Callable[[np.ndarray], np.ndarray]:
    """Return what turns the network's probabilities of the held-out segments `rows` into those of all."""
    if trees.segment_forest is None or valid.feature_tensor is None or not rows:
        return lambda probabilities: probabilities
    numbers = np.asarray(valid.feature_tensor)
    told = trees.segment_forest.predict_probabilities(numbers)
    if trees.vessel_forest is None:
        return lambda probabilities: forest.mix_probabilities(probabilities, told, description.trees_share)
    groups = number_days([row.vessel for row in rows], [row.start for row in rows])
    whole = trees.vessel_forest.predict_probabilities(aggregate_by_day(numbers, groups))[groups]
    return lambda probabilities: forest.mix_geometric(
        forest.mix_probabilities(probabilities, told, description.trees_share), whole, description.vessel_share
    )
