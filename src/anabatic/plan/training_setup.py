"""What of a job decides its memory and time: read from the resolved settings, no device asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anabatic.config.dpo import DpoJob
from anabatic.config.reward import RewardJob
from anabatic.config.rl import RlJob
from anabatic.config.sections.parallel import Recompute
from anabatic.config.vessels.train import ClassifyPretrainJob, ClassifyTrainJob
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError, DataError
from anabatic.plan.decoder_shape import ADAPTER_CONFIG_FILE, DecoderShape, LinearShape, find_model_folder

StrategyName = Literal["single", "ddp", "zero2", "zero3"]
TunerName = Literal["full", "lora", "freeze"]
QUANTIZED_BYTES = {"none": 0.0, "int8": 1.0, "nf4": 0.52}
"""Of a packed weight; nf4: four bits and an 8-bit scale for 64 of them (arXiv 2305.14314, section 3)."""

INPUT_SHARDED_LAYERS = ("o_proj", "down_proj")
"""Layers whose inputs tensor ranks divide; of the others they divide the outputs (arXiv 1909.08053)."""


@dataclass(frozen=True)
class TrainingSetup:
    """A training on one kind of device.

    Attributes:
        ranks: processes that divide the data; tensor: processes that share heads and MLPs.
        micro_tokens: of a forward pass of one rank; micro_steps: forward passes of a step.
        seq_len: longest segment; targets: share of the tokens that are targets.
        half: matrix products run in two bytes.
        fused_adamw: one kernel updates all parameters without copies.
        chunk_bytes: logits made at once.
        mask: attention is the NPU's, which holds a mask.
        whole: tokens that a micro-batch must hold together; 0: a segment.
        words: the head is that over the vocabulary; else a few numbers for a segment.
        reference: what is trained is kept as it was, too, and answers first (`models/preference_loss.py`).
    """

    shape: DecoderShape
    strategy: StrategyName = "single"
    ranks: int = 1
    tensor: int = 1
    offload: bool = False
    tuner: TunerName = "full"
    rank: int = 16
    targets_of_adapters: tuple[str, ...] = ("all-linear",)
    last_layers: int = 2
    quantize: Literal["none", "int8", "nf4"] = "none"
    recompute: Recompute = "none"
    muon: bool = False
    weights: Literal["fp32", "bf16_kahan", "bf16_stochastic"] = "fp32"
    micro_tokens: int = 2048
    micro_steps: int = 1
    seq_len: int = 2048
    targets: float = 1.0
    half: bool = True
    fused_adamw: bool = False
    chunk_bytes: int = 512 << 20
    mask: bool = True
    whole: int = 0
    words: bool = True
    reference: bool = False

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.ranks * self.tensor

    @property
    def min_micro_batch(self) -> int:
        """Tokens of the smallest micro-batch."""
        return self.whole or self.seq_len

    @property
    def is_sharded(self) -> bool:
        """Each rank holds parts."""
        return self.strategy in ("zero2", "zero3")

    @property
    def adapted_linears(self) -> list[LinearShape]:
        """Linear layers of a block with an adapter."""
        wanted = self.targets_of_adapters
        return [layer for layer in self.shape.linears if "all-linear" in wanted or layer.name in wanted]

    @property
    def adapter_block_params(self) -> int:
        """Adapter parameters of a block on a rank; tensor ranks share one half of each."""
        return sum(self.rank * sum(self.get_local_shape(layer)) for layer in self.adapted_linears)

    @property
    def block_params(self) -> int:
        """Parameters of a block on a rank, before the data ranks divide it."""
        s = self.shape
        return sum(layer.params for layer in s.linears) // self.tensor + s.expert_params + s.norm_params

    @property
    def params(self) -> int:
        """Parameters of the model on a rank, before the data ranks divide them; adapters apart."""
        return self.shape.layers * self.block_params + self.shape.outside_params

    def get_local_shape(self, layer: LinearShape) -> tuple[int, int]:
        """Inputs and outputs of a layer that a rank has: tensor ranks divide columns, then rows."""
        if layer.name in INPUT_SHARDED_LAYERS:
            return layer.inputs // self.tensor, layer.outputs
        return layer.inputs, layer.outputs // self.tensor

    @property
    def blocks_with_activations(self) -> int:
        """Blocks that keep something for the backward pass: from the first that has a gradient on."""
        return self.trained_blocks if self.tuner == "freeze" else self.shape.layers

    @property
    def trained_blocks(self) -> int:
        """Blocks, counted from the end, whose weights are trained."""
        if self.tuner == "full":
            return self.shape.layers
        return min(self.last_layers, self.shape.layers) if self.tuner == "freeze" else 0

    @property
    def trained_params(self) -> int:
        """Parameters of a rank with a gradient."""
        if self.tuner == "full":
            return self.params - (0 if self.words or self.shape.is_tied else self.shape.embedding_params)
        if self.tuner == "lora":
            return self.shape.layers * self.adapter_block_params
        return self.trained_blocks * self.block_params

    @property
    def frozen_params(self) -> int:
        """Parameters without one."""
        return self.params - (0 if self.tuner == "lora" else self.trained_params)


def _resolve_tuner(job: Any) -> tuple[TunerName, int]:
    """What is trained, and the rank of adapters: `auto` continues with an adapter where the model is one."""
    if not hasattr(job, "tuner"):
        return "full", 0
    file = find_model_folder(Path(job.model).expanduser()) / ADAPTER_CONFIG_FILE
    if job.tuner not in ("auto", "lora") or not file.is_file() or (file.parent / "config.json").is_file():
        return ("full" if job.tuner == "auto" else job.tuner), job.lora.r
    try:
        rank = json_reader.read_json_file(file)["r"]
        return "lora", int(rank)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read: {error!r}", "look at the file") from None


def build_setup(
    job: Any, shape: DecoderShape, ranks: int, row: Any, half: bool, micro_tokens: int, micro_steps: int
) -> TrainingSetup:
    """Read a resolved job of a command that trains a language model.

    Args:
        row: of the device table.
        half: products in two bytes there.
    """
    strategy: StrategyName = "single"
    if ranks > 1:
        wanted = job.parallel.strategy
        strategy = "ddp" if wanted in ("auto", "ddp", "single") else wanted
    tuner, rank = _resolve_tuner(job)
    return TrainingSetup(
        shape=shape,
        strategy=strategy,
        ranks=ranks,
        tensor=job.parallel.tensor,
        offload=job.parallel.offload == "cpu" and strategy in ("zero2", "zero3") and row.type != "cpu",
        tuner=tuner,
        rank=rank,
        targets_of_adapters=tuple(job.lora.target_modules) if hasattr(job, "lora") else (),
        last_layers=job.freeze.last_layers if hasattr(job, "freeze") else 0,
        quantize=getattr(job, "quantize", "none"),
        recompute=getattr(job, "recompute", None) or job.model.recompute,
        muon=job.optim.name == "muon",
        weights=job.optim.weights,
        micro_tokens=micro_tokens,
        micro_steps=micro_steps,
        seq_len=job.batch.resolved_seq_len,
        half=half,
        fused_adamw=row.fused_adamw and job.optim.weights == "fp32",
        chunk_bytes=row.chunk_bytes,
        mask=row.kernels == "npu",
        **_task_fields(job),
    )


def require_feasible(setup: TrainingSetup) -> None:
    """Refuse what a training would refuse when it has read its model.

    Raises:
        ConfigError: tensor ranks cannot share the heads, the segments are too long, or packed weights would be trained.
    """
    s, parts = setup.shape, setup.tensor
    sizes = {
        "attention heads": s.heads,
        "key/value heads": s.kv_heads,
        "inner neurons": s.mlp_linears[0].outputs if s.mlp_linears else 0,
    }
    if any(size % parts for size in sizes.values()):
        told = ", ".join(f"{size} {name}" for name, size in sizes.items() if size)
        most = math.gcd(*sizes.values())
        good = " or ".join(str(degree) for degree in range(1, most + 1) if most % degree == 0)
        raise ConfigError(f"parallel.tensor is {parts}, which does not divide all of {told}", f"use {good}")
    if 0 < s.max_positions < setup.seq_len:
        told = f"batch.seq_len is {setup.seq_len}, the model was made for {s.max_positions} positions"
        raise ConfigError(told, f"use --batch.seq-len {s.max_positions} or less")
    if setup.quantize != "none" and setup.tuner != "lora":
        what = f"quantize is {setup.quantize}, and the model itself is trained"
        raise ConfigError(what, "use --tuner lora, or --quantize none")
    if setup.quantize != "none" and (setup.is_sharded or parts > 1):
        what = (
            f"quantize is {setup.quantize}, and {setup.strategy if setup.is_sharded else 'parallel.tensor'} divides it"
        )
        raise ConfigError(what, "packed weights are whole on every device: use ddp, or --quantize none")


def _task_fields(job: Any) -> dict[str, Any]:
    """What a command makes of its model."""
    pair = 2 * job.batch.resolved_seq_len  # both sides of a pair are laid side by side
    if isinstance(job, DpoJob):
        return {"whole": pair, "reference": job.loss_type not in ("orpo", "simpo")}
    if isinstance(job, RewardJob):
        return {"whole": pair, "words": False}
    if isinstance(job, RlJob):
        answers = job.sampling.max_new_tokens / job.batch.resolved_seq_len
        return {"reference": job.kl_coef > 0, "targets": min(1.0, answers)}
    if isinstance(job, ClassifyTrainJob):
        return {"words": False}
    if isinstance(job, ClassifyPretrainJob):
        return {"targets": 1.0 if job.objective == "next" else job.mask.ratio}
    return {}
