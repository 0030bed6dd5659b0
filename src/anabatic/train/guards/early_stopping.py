"""Which evaluation is the best so far, and how long nothing has got better."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from anabatic.config.sections.common import Evaluate

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
        """Whether early stopping ends the run."""
        return 0 < config.patience <= self.stale


def _eval_score(row: EvalRow, config: Evaluate) -> float:
    """The larger, the better."""
    value: float = -row["valid_loss"] if config.metric == "loss" else row[f"valid_{config.metric}"]
    return value
