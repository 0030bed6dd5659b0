"""The reward `model:FOLDER`: what a model with one number for a whole conversation says of it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from anabatic.core.errors import ConfigError, DataError
from anabatic.data import tokenizer as tokenizers
from anabatic.data.questions import Question
from anabatic.device.device import Device
from anabatic.rl.judge import Fault
from anabatic.rl.rollout import Rollout


class RewardModel:
    """A Hugging Face folder of a sequence classifier with one label, with its tokenizer and chat template.

    Raises:
        DataError: the folder is missing or damaged.
        ConfigError: its model has several labels, or its tokenizer no chat template.
    """

    def __init__(self, folder: Path, device: Device) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder", "name that of a reward model: model:FOLDER")
        self._tokenizer = tokenizers.load(folder)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{folder} has no chat template", "a reward model reads conversations: add one")
        try:
            model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise DataError(f"{folder}: {error}", "is it the folder of a sequence classifier?") from error
        if model.config.num_labels != 1:
            raise ConfigError(f"{folder} has {model.config.num_labels} labels", "a reward model has one")
        self._model = model.to(device.torch).eval().requires_grad_(False)
        self._device = device

    @torch.no_grad()
    def score(self, rollout: Rollout, question: Question) -> float:
        """Return the model's number for the question with its answer."""
        said = [*question.messages, *rollout.turns]
        ids = self._tokenizer.apply_chat_template(said, tokenize=True, return_dict=False)
        with self._device.autocast():
            out = self._model(torch.tensor([ids], device=self._device.torch)).logits
        value = float(out[0, 0])
        if not math.isfinite(value):
            raise Fault(f"the reward model's number is {value}")
        return value
