"""The trees beside a classifier's network: fitted before it is trained, heard in every evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from anabatic.config.classify_train import ClassifyTrainJob
from anabatic.core import log
from anabatic.core.text import duration
from anabatic.data.sequences import Sequences
from anabatic.models import forest
from anabatic.models.classifier import Description
from anabatic.models.forest import Forest


def grow(job: ClassifyTrainJob, train: Sequences, ships: Sequence[str], description: Description) -> Forest | None:
    """Fit the trees on the training segments; None: the job wants none. Every vessel counts the same.

    Args:
        ships: the vessel of each training segment.
    """
    if not job.head.trees or train.features is None:
        return None
    began = time.monotonic()
    weights = forest.even(ships)
    numbers = np.asarray(train.features)
    found = forest.fit(numbers, train.labels, weights, len(description.classes), job.head.trees, job.seed)
    log.info(
        f"trees: {len(found.root):,} with {len(found.value):,} nodes on {numbers.shape[1]} numbers of"
        f" {len(numbers):,} segments in {duration(time.monotonic() - began)}"
    )
    return found


def mixer(trees: Forest | None, valid: Sequences, description: Description) -> Callable[[np.ndarray], np.ndarray]:
    """Return what turns the network's probabilities of the held-out segments into those of both."""
    if trees is None or valid.features is None:
        return lambda probabilities: probabilities
    told = trees.probabilities(np.asarray(valid.features))
    return lambda probabilities: forest.mixed(probabilities, told, description.trees_share)
