"""The best evaluation, and when patience is over."""

from __future__ import annotations

import json

import pytest

from anabatic.config.sections.common import Data, Evaluate
from anabatic.config.sections.train_jobs import TrainJob
from anabatic.core.errors import ConfigError
from anabatic.train.checkpoint.run_state import BestTracker, TrainProgress
from anabatic.train.objectives import compute_perplexity


def judged(losses: list[float], **settings: object) -> tuple[BestTracker, list[bool], list[bool]]:
    """Return the state after evaluations with these losses, which were the best, and after which it was enough."""
    config, best = Evaluate(every=1, **settings), BestTracker()  # type: ignore[arg-type]
    wins, enough = [], []
    for step, loss in enumerate(losses, 1):
        wins.append(best.record_evaluation(step, {"valid_loss": loss, "valid_accuracy": 1 - loss / 10}, config))
        enough.append(best.should_stop(config))
    return best, wins, enough


def test_the_first_and_every_lower_loss_is_the_best() -> None:
    best, wins, enough = judged([3.0, 2.0, 2.0, 2.5, 1.9])
    assert wins == [True, True, False, False, True] and not any(enough)
    assert best.best == {"step": 5, "valid_loss": 1.9, "valid_accuracy": pytest.approx(0.81)}


def test_patience_counts_evaluations_without_an_improvement() -> None:
    _, _, enough = judged([3.0, 2.0, 2.1, 2.2, 1.9, 1.9, 2.0], patience=2)
    assert enough == [False, False, False, True, False, False, True]


def test_small_gains_keep_the_best_model_but_not_the_patience() -> None:
    best, wins, enough = judged([3.0, 2.9, 2.8, 2.7], patience=3, min_delta=0.5)
    assert all(wins) and enough == [False, False, False, True] and best.mark["valid_loss"] == 3.0
    _, _, enough = judged([3.0, 2.75, 2.5, 2.4], patience=3, min_delta=0.5)
    assert not any(enough), "gains add up to min_delta"


def test_the_metric_decides() -> None:
    config = Evaluate(metric="accuracy")
    best = BestTracker()
    assert best.record_evaluation(1, {"valid_loss": 1.0, "valid_accuracy": 0.2}, config)
    assert best.record_evaluation(2, {"valid_loss": 2.0, "valid_accuracy": 0.3}, config)
    assert not best.record_evaluation(3, {"valid_loss": 0.5, "valid_accuracy": 0.3}, config)


def test_a_checkpoint_keeps_it() -> None:
    progress = TrainProgress(step=4)
    config = Evaluate(every=1, patience=1)
    progress.record_evaluation(2, {"valid_loss": 1 / 3}, config)
    progress.record_evaluation(4, {"valid_loss": 0.4}, config)
    again = TrainProgress(**json.loads(json.dumps(vars(progress))))
    assert again == progress and again.should_stop(config) and not again.should_stop(Evaluate(every=1, patience=2))


def test_patience_needs_evaluations() -> None:
    with pytest.raises(ConfigError, match=r"eval.every is 0"):
        Evaluate(patience=2)
    with pytest.raises(ConfigError, match=r"min_delta"):
        Evaluate(min_delta=-1.0)
    with pytest.raises(ConfigError, match=r"patience is 2, but nothing is held out"):
        TrainJob(data=Data(train=["rows.json"], valid_fraction=0.0), eval=Evaluate(every=1, patience=2))


def test_perplexity() -> None:
    assert compute_perplexity(2.0) == pytest.approx(7.389056) and compute_perplexity(1e4) == float("inf")
