"""Describe a classifier of trajectories: what `classifier.json` has beyond every classifier's fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from anabatic.models import classifier
from anabatic.models.pretrained import resolve_model_folder
from anabatic_vessels.io import classifier_folder


@dataclass(frozen=True)
class TrajectoryDescription(classifier.ClassifierDescription):
    """Description of a classifier of trajectories without its weights.

    Attributes:
        trees_share: weight of the tree ensemble (`model.forest`) in the mean; 0: there is none.
        vessel_share: weight of the trees on a vessel relative to the scores of its segments; 0: there are none.
        points: lengths that the tracks were cut to; empty: not in the rows.
    """

    trees_share: float = 0.0
    vessel_share: float = 0.0
    points: tuple[int, ...] = ()


def read_description(path: str | Path) -> TrajectoryDescription:
    """Read the description of the classifier of a run or a model folder.

    Raises:
        DataError: there is none, or its file is damaged.
    """
    return classifier_folder.read_description(resolve_model_folder(path), TrajectoryDescription)
