"""Host numbers of a checkpoint, `state.json`: how far the run is, and what a run that resumes must agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from anabatic.config.sections.common import Evaluate
from anabatic.core.errors import CheckpointError

RUN_STATE_VERSION = 1
"""Raised when an older version could no longer read what is written. Files without a version are read as 1."""


EvalRow = dict[str, Any]


@dataclass
class BestTracker:
    """What evaluations have found; host numbers that a checkpoint keeps.

    Attributes:
        best: the evaluation of best_model, with its `step`; empty before the first.
        mark: the evaluation that the next ones must beat by `eval.min_delta` to count as an improvement.
        stale: evaluations since `mark`.
    """

    best: EvalRow = field(default_factory=dict)
    mark: EvalRow = field(default_factory=dict)
    stale: int = 0

    def record_evaluation(self, step: int, row: EvalRow, config: Evaluate) -> bool:
        """Note an evaluation; return whether its model is the best so far.

        Any gain makes a model the best. Only a gain of `min_delta` over the mark starts the patience anew, so a slow
        rise counts once it has added up (the rule of Keras' EarlyStopping).
        """
        score = _eval_score(row, config)
        gain = score - _eval_score(self.mark, config) if self.mark else math.inf
        if gain > 0 and gain >= config.min_delta:
            self.mark, self.stale = row, 0
        else:
            self.stale += 1
        if self.best and score <= _eval_score(self.best, config):
            return False
        self.best = {"step": step, **row}
        return True

    def should_stop(self, config: Evaluate) -> bool:
        """Return whether early stopping ends the run."""
        return 0 < config.patience <= self.stale


def _eval_score(row: EvalRow, config: Evaluate) -> float:
    """Return the score of an evaluation; larger is better."""
    value: float = -row["valid_loss"] if config.metric == "loss" else row[f"valid_{config.metric}"]
    return value


@dataclass
class TrainProgress(BestTracker):
    """Host numbers that a checkpoint keeps.

    Attributes:
        evaluated: the last step whose held-out loss they know.
        dropped: where in the data steps begin that are skipped, in micro-batches of all ranks.
        rewinds: of this run; rewound_to: step of the checkpoint that the last one went back to.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    evaluated: int = 0
    last_loss: float | None = None
    loader: dict[str, Any] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    rewinds: int = 0
    rewound_to: int = -1


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says of its run.

    Attributes:
        identity: settings that decide the numbers, flat: `optim.lr` -> value.
        sizes: sizes that follow from the model or the machine.
        world_size: processes that wrote it.
        about: command and strategy, for `anabatic checkpoint list`.
    """

    progress: TrainProgress
    identity: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    world_size: int = 1
    about: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what is written to `state.json`."""
        return {
            "version": RUN_STATE_VERSION,
            "progress": vars(self.progress),
            "identity": self.identity,
            "sizes": self.sizes,
            "world_size": self.world_size,
            "about": self.about,
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any], path: Path) -> RunState:
        """Return what `state.json` of the checkpoint at `path` says.

        Raises:
            CheckpointError: a newer version of this program wrote it, or it is damaged.
        """
        version = tree.get("version", 1)
        if not isinstance(version, int) or version > RUN_STATE_VERSION:
            raise CheckpointError(
                f"{path}: state.json has version {version}, this program reads up to {RUN_STATE_VERSION}",
                "resume with the version that wrote it, or pip install -U anabatic",
            )
        progress = tree.get("progress", {})
        unknown = sorted(set(progress) - {one.name for one in fields(TrainProgress)})
        if unknown:
            raise CheckpointError(
                f"{path}: state.json counts {', '.join(unknown)}, which this version does not support",
                "resume with the version that wrote it, or pip install -U anabatic",
            )
        return cls(
            TrainProgress(**progress),
            tree.get("identity", {}),
            tree.get("sizes", {}),
            tree.get("world_size", 1),
            tree.get("about", {}),
        )
