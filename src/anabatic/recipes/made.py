"""What the stages of a pipeline will have made, for those after them. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.recipes import length

MODELS = ("pretrain", "sft", "dpo", "rl", "merge", "export", "checkpoint export", "classify pretrain")
"""Commands that make a model which writes text."""
OTHERS = {"reward": "a reward model", "classify train": "a classifier"}
"""Commands that make a model which writes no text."""
UNKNOWN = "run"
"""Stands for a stage whose command is none."""


@dataclass(frozen=True)
class Made:
    """What a stage will have made.

    Attributes:
        stage, command: which, and what it runs.
        positions, vocab: of its model, or of its tokenizer; None: not known.
        config: what its model's config.json will say of family and blocks, as far as that is known.
        adapter: whether it is an adapter; None: not known.
    """

    stage: str
    command: str
    positions: int | None = None
    vocab: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    adapter: bool | None = None

    @property
    def has_model(self) -> bool:
        """Whether it makes a model, of whatever kind."""
        return self.command in (*MODELS, *OTHERS)


Earlier = Mapping[str, Made]
"""Folder of an earlier stage -> what it makes."""


def makes(stage: str, command: str, job: Any, earlier: Earlier) -> Made:
    """Return what a stage will have made."""
    base = length.model_of(job)
    positions, vocab = sizes_of(base, earlier) if base else (None, None)
    config = config_of(base, earlier) if base else {}
    if command == "tokenizer train":
        vocab = job.vocab_size
    elif command == "pretrain" and not base:
        positions = job.batch.length
        vocab = sizes_of(job.tokenizer or "", earlier)[1]
        config = {"model_type": "qwen3", "num_hidden_layers": job.model.depth}
    return Made(stage, command, positions, vocab, config, _makes_adapter(job, base, earlier))


def _makes_adapter(job: Any, base: str, earlier: Earlier) -> bool | None:
    tuner = getattr(job, "tuner", "full")  # what has no choice makes a whole model
    return is_adapter(base, earlier) if tuner == "auto" else tuner == "lora"


def of_stage(name: str, earlier: Earlier) -> Made | None:
    """Return what an earlier stage will have made of a path; None: it lies elsewhere."""
    return next((made for folder, made in earlier.items() if whole(name).is_relative_to(whole(folder))), None)


def whole(name: str) -> Path:
    """Return the absolute path of a name; links are kept."""
    return Path(os.path.abspath(os.path.expanduser(name)))


def sizes_of(name: str, earlier: Earlier) -> tuple[int | None, int | None]:
    """Return positions and entries of the vocabulary of a model, as far as they are known."""
    made = of_stage(name, earlier)
    if made is not None:
        return made.positions, made.vocab
    config = length.config_of(name)
    vocab = config.get("vocab_size")
    return length.positions_of(config), vocab if isinstance(vocab, int) else None


def config_of(name: str, earlier: Earlier) -> Mapping[str, Any]:
    """Return the config.json of a model, as far as it is known; of an adapter that of its base."""
    made = of_stage(name, earlier)
    return length.config_of(name) if made is None else made.config


def is_adapter(name: str, earlier: Earlier) -> bool | None:
    """Whether a model is an adapter; None: not known."""
    made = of_stage(name, earlier)
    if made is not None:
        return made.adapter
    folder = length.folder_of(name)
    return None if folder is None else not (folder / "config.json").is_file()
