"""The trees beside a classifier's network: fitted before it is trained, heard in every evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from anabatic.config.classify_train import ClassifyTrainJob
from anabatic.core import log
from anabatic.core.text import duration
from anabatic.data.sequences import Sequences
from anabatic.models import forest
from anabatic.models.classifier import Description
from anabatic.models.forest import Forest
from anabatic.models.vessel_numbers import days, over_days
from anabatic.trajectory.segment import Segment


@dataclass(frozen=True)
class Trees:
    """What stands beside the network.

    Attributes:
        segments: on the numbers of each segment; None: there are none.
        vessels: on the numbers of a vessel's day; None: there are none.
    """

    segments: Forest | None = None
    vessels: Forest | None = None

    @property
    def files(self) -> dict[str, str | bytes]:
        """Name in the model folder -> content."""
        named = {forest.FILE: self.segments, forest.VESSELS: self.vessels}
        return {name: one.as_bytes() for name, one in named.items() if one is not None}


def grow(job: ClassifyTrainJob, train: Sequences, rows: Sequence[Segment], description: Description) -> Trees:
    """Fit the trees that the job wants on the training segments. Every vessel counts the same.

    Args:
        rows: the training segments.
    """
    if train.features is None or not job.head.trees:
        return Trees()
    began = time.monotonic()
    numbers, classes, head = np.asarray(train.features), len(description.classes), job.head
    weights = forest.even([row.vessel for row in rows])
    growth = forest.PLACES if "location" in head.features else forest.SEGMENTS
    segments = forest.fit(numbers, train.labels, weights, classes, head.trees, job.seed, growth)
    _say("numbers of each segment", segments, numbers, began)
    if not head.vessel_trees:
        return Trees(segments)
    began = time.monotonic()
    groups = days([row.vessel for row in rows], [row.start for row in rows])
    first = np.unique(groups, return_index=True)[1]
    weights = forest.even([rows[at].vessel for at in first])
    own = over_days(numbers, groups)
    labels = train.labels[first]
    vessels = forest.fit(own, labels, weights, classes, head.vessel_trees, job.seed, forest.BY_VESSEL)
    _say("numbers of each vessel", vessels, own, began)
    return Trees(segments, vessels)


def _say(what: str, found: Forest, numbers: np.ndarray, began: float) -> None:
    log.info(
        f"trees on the {what}: {len(found.root):,} with {len(found.value):,} nodes, {numbers.shape[1]} numbers of"
        f" {len(numbers):,} rows, in {duration(time.monotonic() - began)}"
    )


def mixer(
    trees: Trees, valid: Sequences, rows: Sequence[Segment], description: Description
) -> Callable[[np.ndarray], np.ndarray]:
    """Return what turns the network's probabilities of the held-out segments `rows` into those of all."""
    if trees.segments is None or valid.features is None or not rows:
        return lambda probabilities: probabilities
    numbers = np.asarray(valid.features)
    told = trees.segments.probabilities(numbers)
    if trees.vessels is None:
        return lambda probabilities: forest.mixed(probabilities, told, description.trees_share)
    groups = days([row.vessel for row in rows], [row.start for row in rows])
    whole = trees.vessels.probabilities(over_days(numbers, groups))[groups]
    return lambda probabilities: forest.pooled(
        forest.mixed(probabilities, told, description.trees_share), whole, description.vessel_share
    )
