"""The reward `model:FOLDER`: what a model with one number for a whole conversation says of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

from anabatic.core.errors import ConfigError, DataError
from anabatic.data import tokenizer as tokenizers
from anabatic.data.questions import Question
from anabatic.device.device import Device
from anabatic.models.hf import load_config, resolve
from anabatic.rl.judge import Fault
from anabatic.rl.rollout import Rollout


class RewardModel:
    """A sequence classifier with one label, with its tokenizer and chat template.

    Args:
        named: its Hugging Face folder, or the run folder that it lies in.

    Raises:
        DataError: the folder is missing or damaged.
        ConfigError: its model is another one, or has several labels, or its tokenizer no chat template.
    """

    def __init__(self, named: Path, device: Device) -> None:
        folder = resolve(named)
        config = load_config(folder)
        kinds = config.architectures or ["nothing"]
        if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
            raise ConfigError(
                f"{folder} is no sequence classifier: its config.json says {', '.join(kinds)}",
                "make a reward model with `anabatic reward`",
            )
        if config.num_labels != 1:
            raise ConfigError(f"{folder} has {config.num_labels} labels", "a reward model has one")
        self._tokenizer = tokenizers.load(folder)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"{folder} has no chat template", "a reward model reads conversations: add one")
        model = _loaded(folder)
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


def _loaded(folder: Path) -> Any:
    """Load a classifier, whole and without a progress bar between the lines of the log."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, told = AutoModelForSequenceClassification.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{folder}: {error}", "is it the folder of a sequence classifier?") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    if told["missing_keys"]:
        missing = ", ".join(sorted(told["missing_keys"])[:3])
        raise DataError(f"{folder}: weights are missing: {missing}", "copy the folder again")
    return model
