"""`anabatic pretrain`: a language model from text; mid-training when `model.path` names a start."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import Recompute, require_setting
from anabatic.config.sections.train_jobs import TrainJob, WithAuto

DEFAULT_DEPTH = 12


@dataclass(kw_only=True)
class PretrainModel:
    """A model built from one dial, `depth`, or a Hugging Face folder to continue from."""

    path: str | None = None
    """Hugging Face folder of a causal language model to continue from."""
    depth: int | None = None
    """Transformer blocks; width, heads, batch, learning rates and horizon follow from it. Default: 12; with
    `schedule.minutes` as many as get `schedule.tokens_per_param` in that time."""
    width: int | None = None
    """Hidden size; default 64 x depth, rounded up to a whole number of heads."""
    head_dim: int = 128
    """Size of an attention head; lowered to 64 or 32 when the width is small."""
    heads: int | None = None
    """Query heads; default width / head_dim."""
    kv_heads: int | None = None
    """Key/value heads (grouped-query attention); default: as many as query heads."""
    intermediate: int | None = None
    """Inner size of the SwiGLU block; default 8/3 x width, rounded up to a multiple of 64."""
    tie_embeddings: bool | None = None
    """One matrix for input embedding and output head; default: tied when it would be over a third of the weights."""
    rope_theta: float = 100_000.0
    """Base of the rotary position embedding."""
    recompute: Recompute = "none"
    """Activation checkpointing: selective keeps matrix products and attention, full only the blocks' inputs."""

    def __post_init__(self) -> None:
        require_setting(
            self.depth is None or self.depth >= 1,
            f"model.depth is {self.depth}",
            "use 1 or more; 4 for a CPU, 20 for eight NPUs",
        )
        for name in ("width", "heads", "kv_heads", "intermediate"):
            value = getattr(self, name)
            require_setting(value is None or value >= 1, f"model.{name} is {value}", "use 1 or more, or leave it out")

    @property
    def resolved_depth(self) -> int:
        """Blocks of a new model."""
        return DEFAULT_DEPTH if self.depth is None else self.depth


@dataclass(kw_only=True)
class PretrainJob(TrainJob, WithAuto):
    """Train a language model on text, or continue one on a mixture."""

    out: str = "runs/pretrain"
    """Run folder."""
    tokenizer: str | None = None
    """Folder with tokenizer.json; default: the one in model.path."""
    seed: int = 0
    """Seed of weights and data order."""
    model: PretrainModel = field(default_factory=PretrainModel)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(
            self.tokenizer is not None or self.model.path is not None,
            "neither tokenizer nor model.path is given",
            "train a tokenizer with `anabatic tokenizer train`, then give --tokenizer FOLDER",
        )
        require_setting(
            self.batch.packing, "batch.packing is false, and text has no rows to pad", "only `anabatic sft` pads"
        )
        require_setting(
            bool(self.data.train), "data.train is empty", "give --data.train PATH, or `stdlib:` to try it out"
        )
