"""`anabatic sft`: fine-tune a causal language model on conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.curriculum import Curriculum
from anabatic.config.parallel import Parallel, Recompute
from anabatic.config.shared import Batch, Data, Device, Evaluate, Log, Optim, Save, Schedule, require
from anabatic.config.tuner import Freeze, Lora


def _sft_optim() -> Optim:
    return Optim(name="adamw", weight_decay=0.0, beta2=0.999, eps=1e-8)


def _sft_schedule() -> Schedule:
    return Schedule(epochs=1.0, warmup_ratio=0.03, decay_ratio=0.97)


@dataclass(kw_only=True)
class SftJob:
    """Fine-tune on conversations; only the assistant's tokens are learned."""

    out: str = "runs/sft"
    """Run folder."""
    model: str = ""
    """Hugging Face folder of the model, with its tokenizer and chat template; or OWNER/NAME on a hub."""
    hub: Literal["huggingface", "modelscope"] | None = None
    """Where OWNER/NAME lies; default: ANABATIC_HUB, modelscope with USE_MODELSCOPE_HUB=1, else huggingface."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; default: the one of the model."""
    seed: int = 0
    """Seed of the data order."""
    tuner: Literal["auto", "full", "lora", "freeze"] = "auto"
    """full: train all weights; lora: adapters; freeze: the last blocks; auto: full, but an adapter as model goes on
    as one."""
    lora: Lora = field(default_factory=Lora)
    freeze: Freeze = field(default_factory=Freeze)
    train_on_inputs: bool = False
    """Learn the user's and system's tokens too."""
    last_turn_only: bool = False
    """Learn the assistant's last turn alone."""
    truncation_strategy: Literal["right", "left", "delete", "split"] = "right"
    """A conversation of more than batch.seq_len tokens loses its end or its beginning, is left out, or is parted."""
    recompute: Recompute = "none"
    """Activation checkpointing: selective keeps matrix products and attention, full only the blocks' inputs."""
    fused: Literal["auto", "off"] = "auto"
    """Fused operators where a module is proved to compute the same; off: transformers' own, packed all the same."""
    curriculum: Curriculum = field(default_factory=Curriculum)
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optim: Optim = field(default_factory=_sft_optim)
    schedule: Schedule = field(default_factory=_sft_schedule)
    eval: Evaluate = field(default_factory=Evaluate)
    save: Save = field(default_factory=Save)
    log: Log = field(default_factory=Log)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        require(bool(self.out.strip()), "out is empty", "give --out FOLDER")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}", "use a whole number from 0")
        require(bool(self.model), "model is not given", "give --model FOLDER, a Hugging Face folder")
        if not self.batch.packing:
            what = "device.compile is on, and padded batches have another shape each"
            require(self.device.compile != "on", what, "set device.compile to off, or batch.packing to true")
        both = self.train_on_inputs and self.last_turn_only
        require(not both, "train_on_inputs and last_turn_only are both set", "use one of them")
        require(bool(self.data.train), "data.train is empty", "give --data.train FILE.jsonl with `messages` rows")
