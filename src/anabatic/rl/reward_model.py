"""The reward `model:FOLDER`: what a model with one number for a whole conversation says of it."""

from __future__ import annotations

from pathlib import Path

from anabatic.core.errors import DataError, Failure
from anabatic.data.questions import Question
from anabatic.device.device import Device
from anabatic.infer.score import Scorer
from anabatic.rl.judge import Fault
from anabatic.rl.rollout import Rollout


class RewardModel:
    """A Hugging Face folder of a sequence classifier with one label, or an adapter for one, or the run that made it.

    Raises:
        DataError: the folder is missing or damaged.
        ConfigError: its model is another one, or has several labels, or its tokenizer no chat template.
    """

    def __init__(self, folder: Path, device: Device) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder", "name that of a reward model: model:FOLDER")
        self._scorer = Scorer(folder, device)

    def score(self, rollout: Rollout, question: Question) -> float:
        """Return the model's number for the question with its answer."""
        try:
            (value,) = self._scorer.scores([self._scorer.ids([*question.messages, *rollout.turns])])
        except (DataError, Failure) as error:
            raise Fault(str(error)) from error
        return value
