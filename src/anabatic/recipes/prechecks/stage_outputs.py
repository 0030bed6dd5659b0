"""What the stages of a pipeline will have made, for those after them. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.recipes import sequence_length

TEXT_MODEL_COMMANDS = ("pretrain", "sft", "dpo", "rl", "merge", "export", "checkpoint export", "classify pretrain")
"""Commands that make a model which writes text."""
OTHER_MODEL_COMMANDS = {"reward": "a reward model", "classify train": "a classifier"}
"""Commands that make a model which writes no text."""
UNKNOWN_COMMAND = "run"
"""Stands for a stage whose command is none."""


@dataclass(frozen=True)
class StageOutput:
    """What a stage will have made.

    Attributes:
        stage, command: which, and what it runs.
        max_positions, vocab_size: of its model, or of its tokenizer; None: not known.
        config: what its model's config.json will say of family and blocks, as far as that is known.
        is_adapter: whether it is an adapter; None: not known.
    """

    stage: str
    command: str
    max_positions: int | None = None
    vocab_size: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    is_adapter: bool | None = None

    @property
    def has_model(self) -> bool:
        """Whether it makes a model, of whatever kind."""
        return self.command in (*TEXT_MODEL_COMMANDS, *OTHER_MODEL_COMMANDS)


EarlierOutputs = Mapping[str, StageOutput]
"""Folder of an earlier stage -> what it makes."""


def predict_stage_output(stage: str, command: str, job: Any, earlier: EarlierOutputs) -> StageOutput:
    """Return what a stage will have made."""
    base = sequence_length.model_name(job)
    positions, vocab = read_model_sizes(base, earlier) if base else (None, None)
    config = read_model_config(base, earlier) if base else {}
    if command == "tokenizer train":
        vocab = job.vocab_size
    elif command == "pretrain" and not base:
        positions = job.batch.resolved_seq_len
        vocab = read_model_sizes(job.tokenizer or "", earlier)[1]
        config = {"model_type": "qwen3", "num_hidden_layers": job.model.depth}
    return StageOutput(stage, command, positions, vocab, config, _predicts_adapter(job, base, earlier))


def _predicts_adapter(job: Any, base: str, earlier: EarlierOutputs) -> bool | None:
    tuner = getattr(job, "tuner", "full")  # what has no choice makes a whole model
    return is_adapter(base, earlier) if tuner == "auto" else tuner == "lora"


def find_stage_output(name: str, earlier: EarlierOutputs) -> StageOutput | None:
    """Return what an earlier stage will have made of a path; None: it lies elsewhere."""
    return next(
        (output for folder, output in earlier.items() if absolute_path(name).is_relative_to(absolute_path(folder))),
        None,
    )


def absolute_path(name: str) -> Path:
    """Return the absolute path of a name; links are kept."""
    return Path(os.path.abspath(os.path.expanduser(name)))


def read_model_sizes(name: str, earlier: EarlierOutputs) -> tuple[int | None, int | None]:
    """Return positions and entries of the vocabulary of a model, as far as they are known."""
    stage_output = find_stage_output(name, earlier)
    if stage_output is not None:
        return stage_output.max_positions, stage_output.vocab_size
    config = sequence_length.read_local_config(name)
    vocab = config.get("vocab_size")
    return sequence_length.max_positions(config), vocab if isinstance(vocab, int) else None


def read_model_config(name: str, earlier: EarlierOutputs) -> Mapping[str, Any]:
    """Return the config.json of a model, as far as it is known; of an adapter that of its base."""
    stage_output = find_stage_output(name, earlier)
    return sequence_length.read_local_config(name) if stage_output is None else stage_output.config


def is_adapter(name: str, earlier: EarlierOutputs) -> bool | None:
    """Whether a model is an adapter; None: not known."""
    stage_output = find_stage_output(name, earlier)
    if stage_output is not None:
        return stage_output.is_adapter
    folder = sequence_length.find_local_model(name)
    return None if folder is None else not (folder / "config.json").is_file()
