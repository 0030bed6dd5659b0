"""`anabatic dpo`: train a model on preferences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.parallel import Parallel, Recompute
from anabatic.config.shared import Batch, Data, Device, Evaluate, Log, Optim, Save, Schedule, require
from anabatic.config.tuner import Freeze, Lora


def _dpo_optim() -> Optim:
    return Optim(name="adamw", weight_decay=0.0, beta2=0.999, eps=1e-8)


def _dpo_schedule() -> Schedule:
    return Schedule(epochs=1.0, warmup_ratio=0.1, decay_ratio=0.9)


@dataclass(kw_only=True)
class DpoJob:
    """Train on pairs of a better and a worse answer: direct preference optimisation and its relatives."""

    out: str = "runs/dpo"
    """Run folder."""
    model: str = ""
    """Hugging Face folder of the model, with its tokenizer and chat template; it is also the reference."""
    hub: Literal["huggingface", "modelscope"] | None = None
    """Where OWNER/NAME lies; default: ANABATIC_HUB, modelscope with USE_MODELSCOPE_HUB=1, else huggingface."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; default: the one of the model."""
    seed: int = 0
    """Seed of the data order."""
    beta: float = 0.1
    """How strongly the model is held to the reference; for ipo the paper's tau."""
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO (arXiv 2305.18290); ipo: arXiv 2310.12036, per token; hinge: arXiv 2305.10425."""
    label_smoothing: float = 0.0
    """Share of the pairs that are assumed to be labelled the wrong way round; sigmoid alone."""
    rpo_alpha: float | None = None
    """Weight of the better answer's cross-entropy per token, added to the loss (arXiv 2404.19733)."""
    tuner: Literal["auto", "full", "lora", "freeze"] = "auto"
    """full: train all weights; lora: adapters; freeze: the last blocks; auto: full, but an adapter as model goes on
    as one."""
    lora: Lora = field(default_factory=Lora)
    freeze: Freeze = field(default_factory=Freeze)
    truncation_strategy: Literal["right", "left", "delete"] = "right"
    """An answer with its question of more than batch.seq_len tokens loses its end or its beginning; delete: the pair is
    left out."""
    recompute: Recompute = "none"
    """Activation checkpointing: selective keeps matrix products and attention, full only the blocks' inputs."""
    fused: Literal["auto", "off"] = "auto"
    """Fused operators where a module is proved to compute the same; off: transformers' own, packed all the same."""
    parallel: Parallel = field(default_factory=Parallel)
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optim: Optim = field(default_factory=_dpo_optim)
    schedule: Schedule = field(default_factory=_dpo_schedule)
    eval: Evaluate = field(default_factory=Evaluate)
    save: Save = field(default_factory=Save)
    log: Log = field(default_factory=Log)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        require(bool(self.out.strip()), "out is empty", "give --out FOLDER")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}", "use a whole number from 0")
        require(bool(self.model), "model is not given", "give --model FOLDER, a fine-tuned model")
        require(self.batch.packing, "batch.packing is false, and pairs are always packed", "leave it out")
        require(self.beta > 0, f"beta is {self.beta}", "use a positive number; 0.1 is common")
        require(
            0.0 <= self.label_smoothing < 0.5,
            f"label_smoothing is {self.label_smoothing}",
            "use a share from 0 up to, not including, 0.5",
        )
        require(
            not self.label_smoothing or self.loss_type == "sigmoid",
            f"label_smoothing is {self.label_smoothing} with loss_type {self.loss_type}",
            "it belongs to loss_type sigmoid",
        )
        require(self.rpo_alpha is None or self.rpo_alpha >= 0, f"rpo_alpha is {self.rpo_alpha}", "use 0 or more")
        require(bool(self.data.train), "data.train is empty", "give --data.train FILE.jsonl with rows of two answers")
        require(self.batch.packing, "batch.packing is false, and pairs are always packed", "leave batch.packing out")
        for name in ("micro_batch_tokens", "global_batch_tokens"):
            value = getattr(self.batch, name)
            require(
                value is None or value >= 2 * self.batch.seq_len,
                f"batch.{name} is {value}, a pair has up to 2 x batch.seq_len = {2 * self.batch.seq_len} tokens",
                f"raise batch.{name} or lower batch.seq_len",
            )
