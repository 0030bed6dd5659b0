"""The reward `model:FOLDER`: what a model with one number for a whole conversation says of it."""

from __future__ import annotations

from pathlib import Path

from anabatic.core.errors import DataError, Failure
from anabatic.data.scoring.questions import Question
from anabatic.device.device import Device
from anabatic.infer.reward_scorer import RewardScorer
from anabatic.rl.reward_worker import RewardCallError
from anabatic.rl.rollout import Rollout


class ModelReward:
    """A Hugging Face folder of a sequence classifier with one label, or an adapter for one, or the run that made it.

    Raises:
        DataError: the folder is missing or damaged.
        ConfigError: its model is another one, or has several labels, or its tokenizer no chat template.
    """

    def __init__(self, folder: Path, device: Device) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder", "name that of a reward model: model:FOLDER")
        self._scorer = RewardScorer(folder, device)

    def score_rollout(self, rollout: Rollout, question: Question) -> float:
        """Return the model's number for the question with its answer."""
        try:
            (value,) = self._scorer.score_conversations(
                [self._scorer.encode_conversation([*question.messages, *rollout.turns])]
            )
        except (DataError, Failure) as error:
            raise RewardCallError(str(error)) from error
        return value
