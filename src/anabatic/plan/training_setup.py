"""The settings of a job that decide its memory and time, read without a device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from anabatic.config.sections.common import ContextMethod, Recompute
from anabatic.config.sections.plan_facts import PlanFacts
from anabatic.config.sections.train_jobs import TuneJob
from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.plan.layer_names import ALL_EXPERTS, is_expert_target, matches_name_end
from anabatic.plan.model_shape import ADAPTER_CONFIG_FILE, find_model_folder
from anabatic.plan.shapes.attention_kinds import AttentionKind, DeltaAttention, LinearShape
from anabatic.plan.shapes.decoder_shape import DecoderShape
from anabatic.plan.shapes.tower_sizes import PictureLoad

StrategyName = Literal["single", "ddp", "zero2", "zero3"]
TunerName = Literal["full", "lora", "freeze"]
QUANTIZED_BYTES = {"none": 0.0, "int8": 1.0, "nf4": 0.52}
"""Bytes of a quantized weight; nf4: four bits and an 8-bit scale per 64 weights (arXiv 2305.14314, section 3)."""

INPUT_SHARDED_LAYERS = ("o_proj", "down_proj", "out_proj")
"""Row-parallel layers: tensor ranks divide their inputs; of all others the outputs (arXiv 1909.08053)."""


DIVIDING_SETTINGS = ("pipeline", "replicate", "context", "expert", "tensor", "pipeline_chunks")
"""Settings of `parallel` that divide a training among devices."""


@dataclass(frozen=True)
class Layout:
    """Division of a training among devices, with its offload and recomputation; fields as in the settings."""

    strategy: StrategyName
    offload: bool
    recompute: Recompute
    pipeline: int = 1
    replicate: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    pipeline_chunks: int = 1

    @property
    def divisions(self) -> dict[str, int]:
        """Setting -> size of the dimensions of the mesh, and the chunks of a stage."""
        return {name: getattr(self, name) for name in DIVIDING_SETTINGS}

    def format(self) -> str:
        """Return the layout as words of a message."""
        sizes = [f"{name} {size}" for name, size in self.divisions.items() if size != 1]
        return ", ".join(
            [f"{self.strategy}{', offload' if self.offload else ''}", *sizes, f"recompute {self.recompute}"]
        )


@dataclass(frozen=True)
class TrainingSetup:
    """A training on one kind of device.

    Attributes:
        ranks: processes with different batches; context: processes that share the tokens of a batch; tensor:
            tensor-parallel processes; replicate: groups that each hold all shards of the weights; expert: processes
            that share the experts of a block, with different batches.
        pipeline: stages among which the layers are divided; pipeline_chunks: parts of each stage; stage: the one that
            this setup describes, with its own layers (`pipeline_stages.list_stages`); None: all of them.
        micro_tokens: tokens of a micro-batch; micro_steps: micro-batches per step and rank.
        seq_len: longest segment; targets: fraction of the tokens that are target tokens.
        half: matrix products run in half precision.
        fused_adamw: one kernel updates all parameters without copies.
        chunk_bytes: bytes of logits per chunk.
        uses_attention_mask: the fused attention of the NPU is used, which allocates a mask.
        casts_blocks: the weights of a block are cast together, and again in the backward pass
            (`models/weight_casts.py`).
        indivisible_tokens: tokens that a micro-batch must contain together; 0: one segment.
        has_lm_head: the head covers the vocabulary; else it returns a few numbers per segment.
        has_reference: a copy of the initial weights runs forward, too (`models/preference_loss.py`).
        trains_tower, trains_projector: these parts of a model that sees are trained, not frozen.
        pictures: of its rows; None: they are of text alone.
    """

    shape: DecoderShape
    strategy: StrategyName = "single"
    ranks: int = 1
    context: int = 1
    context_method: ContextMethod = "ulysses"
    tensor: int = 1
    replicate: int = 1
    expert: int = 1
    pipeline: int = 1
    pipeline_chunks: int = 1
    stage: int | None = None
    offload: bool = False
    tuner: TunerName = "full"
    rank: int = 16
    targets_of_adapters: tuple[str, ...] = ("all-linear",)
    last_layers: int = 2
    quantize: Literal["none", "int8", "nf4"] = "none"
    recompute: Recompute = "none"
    muon: bool = False
    weights: Literal["fp32", "bf16_kahan", "bf16_stochastic"] = "fp32"
    weight_decay: float = 0.0
    micro_tokens: int = 2048
    micro_steps: int = 1
    seq_len: int = 2048
    targets: float = 1.0
    half: bool = True
    fused_adamw: bool = False
    chunk_bytes: int = 512 << 20
    uses_attention_mask: bool = True
    casts_blocks: bool = True
    indivisible_tokens: int = 0
    has_lm_head: bool = True
    has_reference: bool = False
    trains_tower: bool = False
    trains_projector: bool = False
    pictures: PictureLoad | None = None

    @cached_property
    def layout(self) -> Layout:
        """Division among devices, offload and recomputation."""
        sizes = {name: getattr(self, name) for name in DIVIDING_SETTINGS}
        return Layout(self.strategy, self.offload, self.recompute, **sizes)

    @property
    def has_stages(self) -> bool:
        """Whether it is a whole pipeline, not one stage of it."""
        return self.pipeline > 1 and self.stage is None

    @cached_property
    def world_size(self) -> int:
        """Number of all processes."""
        return self.gradient_ranks * self.tensor * self.pipeline

    @cached_property
    def gradient_ranks(self) -> int:
        """Number of processes whose gradients are added."""
        return self.ranks * self.context

    @cached_property
    def shard_ranks(self) -> int:
        """Number of processes among which sharded weights are divided."""
        return self.gradient_ranks // self.replicate

    @cached_property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one rank, rounded up."""
        return -(-self.micro_tokens // self.context)

    @cached_property
    def repeated_key_heads(self) -> int:
        """Key heads of the tensor group that attention of context ranks reads (`parallel/context_exchange.py`)."""
        return math.lcm(max(1, self.shape.kv_heads // self.tensor), self.context)

    @cached_property
    def attention(self) -> AttentionKind | None:
        """Attention other than plain queries, keys and values, as the ranks compute it together."""
        kind = self.shape.attention
        return kind.copy_keys(self.context, self.tensor) if isinstance(kind, DeltaAttention) else kind

    @cached_property
    def min_micro_batch(self) -> int:
        """Tokens of the smallest micro-batch."""
        return self.indivisible_tokens or self.seq_len

    @cached_property
    def is_sharded(self) -> bool:
        """Whether each rank stores a shard of the weights."""
        return self.strategy in ("zero2", "zero3")

    @cached_property
    def has_embedding(self) -> bool:
        """Whether tokens enter here: always, but for the later stages of a pipeline."""
        return not self.stage

    @cached_property
    def outside_params(self) -> int:
        """Parameters outside the blocks; a tied embedding is on the first and on the last stage of a pipeline."""
        if self.stage is None:
            return self.shape.outside_params
        head = self.shape.embedding_params + self.shape.hidden
        return self.shape.embedding_params * self.has_embedding + head * (self.stage == self.pipeline - 1)

    @cached_property
    def adapted_linears(self) -> list[LinearShape]:
        """Linear layers of a block with an adapter."""
        targets = self.targets_of_adapters
        return [layer for layer in self.shape.linears if "all-linear" in targets or layer.name in targets]

    def count_kinds(self, blocks: int | None = None, from_end: bool = True) -> list[tuple[TrainingSetup, int]]:
        """Return setups of equal blocks for the kinds among the last (or first) `blocks` blocks, and how many each."""
        if not self.shape.kinds:
            return [(self, self.shape.count_kinds(blocks)[0][1])]
        return [(replace(self, shape=kind), count) for kind, count in self.shape.count_kinds(blocks, from_end)]

    @cached_property
    def held_experts(self) -> float:
        """Fraction of the experts that a rank holds before data-parallel sharding, which divides them as far as all
        other weights."""
        return 1.0 if self.is_sharded else 1 / self.expert

    @cached_property
    def has_plain_experts(self) -> bool:
        """Whether a rank holds its part of divided experts as plain tensors: FSDP leaves them alone where no rank of a
        copy has the same ones (`parallel/sharding.py`)."""
        return self.expert > 1 and (not self.is_sharded or self.shard_ranks == self.expert)

    def count_divided_params(self, blocks: int | None = None) -> int:
        """Return the trained parameters of divided experts on a rank, of the last `blocks` blocks; 0: none are."""
        if self.expert == 1:
            return 0
        blocks = self.shape.layers if blocks is None else blocks
        if self.tuner == "lora":
            total = sum(count * kind.expert_adapter_params for kind, count in self.count_kinds(blocks))
        else:
            trained = self.count_kinds(min(blocks, self.trained_blocks))
            total = sum(count * round(self.held_experts * kind.shape.stacked_params) for kind, count in trained)
        return round(total / (self.shard_ranks if self.is_sharded else 1))

    @cached_property
    def whole_experts(self) -> TrainingSetup:
        """The same with all experts on every rank: what a checkpoint and a saved model hold."""
        return replace(self, expert=1)

    @cached_property
    def gathered_block_params(self) -> int:
        """Parameters of a block that a rank gathers, of several kinds the most: not the experts of other ranks, nor
        those that FSDP leaves alone."""
        if self.shape.kinds:
            return max(kind.gathered_block_params for kind, _ in self.count_kinds())
        adapters = self.adapter_block_params if self.tuner == "lora" else 0
        elsewhere = 1.0 if self.has_plain_experts else 1 - 1 / self.expert
        stacked = self.shape.stacked_params + (self.expert_adapter_params if self.tuner == "lora" else 0)
        return self.block_params + adapters - round(elsewhere * stacked)

    @cached_property
    def expert_adapter_params(self) -> int:
        """Adapter parameters of the experts of a block."""
        s, targets = self.shape, self.targets_of_adapters
        sizes = {"gate_up_proj": s.hidden + 2 * s.expert_inner, "down_proj": s.hidden + s.expert_inner}
        named = [
            size
            for name, size in sizes.items()
            if any(
                is_expert_target(target) and (target == ALL_EXPERTS or matches_name_end(target, name))
                for target in targets
            )
        ]
        return round(s.experts * self.held_experts) * self.rank * sum(named)

    @cached_property
    def adapter_block_params(self) -> int:
        """Adapter parameters of a block on a rank, of several kinds the most; tensor ranks divide one matrix of each
        adapter."""
        if self.shape.kinds:
            return max(kind.adapter_block_params for kind, _ in self.count_kinds())
        linear = sum(self.rank * sum(self.get_local_shape(layer)) for layer in self.adapted_linears)
        return linear + self.expert_adapter_params

    @cached_property
    def block_params(self) -> int:
        """Parameters of a block on a rank, of several kinds the most, before data-parallel sharding."""
        if self.shape.kinds:
            return max(kind.block_params for kind, _ in self.count_kinds())
        s = self.shape
        elsewhere = round((1 - self.held_experts) * s.stacked_params)
        return sum(layer.params for layer in s.linears) // self.tensor + s.expert_params - elsewhere + s.norm_params

    @cached_property
    def params(self) -> int:
        """Parameters of the model on a rank, before data-parallel sharding, without adapters."""
        return sum(count * kind.block_params for kind, count in self.count_kinds()) + self.outside_params

    def get_local_shape(self, layer: LinearShape) -> tuple[int, int]:
        """Return the inputs and outputs of a layer on one tensor rank."""
        if layer.name in INPUT_SHARDED_LAYERS:
            return layer.inputs // self.tensor, layer.outputs
        return layer.inputs, layer.outputs // self.tensor

    @cached_property
    def blocks_with_activations(self) -> int:
        """Number of blocks that save activations: from the first block with a gradient on."""
        return self.trained_blocks if self.tuner == "freeze" else self.shape.layers

    @cached_property
    def trained_blocks(self) -> int:
        """Number of trained blocks, counted from the end."""
        if self.tuner == "full":
            return self.shape.layers
        return min(self.last_layers, self.shape.layers) if self.tuner == "freeze" else 0

    @cached_property
    def trained_params(self) -> int:
        """Number of parameters of a rank with a gradient."""
        return self._trained_text_params + self._trained_tower_params

    @cached_property
    def _trained_tower_params(self) -> int:
        """Parameters of tower and projector with a gradient; adapters are in all of their linear layers."""
        tower = self.shape.tower
        if self.tuner == "freeze" or not self.shape.tower_params:
            return 0
        projector = 0 if tower is None else tower.projector_params
        if self.tuner == "full":
            return (self.shape.tower_params - projector) * self.trains_tower + projector * self.trains_projector
        if tower is None:
            return 0
        blocks, joined = (sum(map(sum, matrices)) for matrices in (tower.matrices, tower.projector_matrices))
        return self.rank * (tower.depth * blocks * self.trains_tower + joined * self.trains_projector)

    @cached_property
    def _trained_text_params(self) -> int:
        if self.tuner == "full" and self.stage is not None:
            return self.params
        if self.tuner == "full":
            return self.params - (0 if self.has_lm_head or self.shape.is_tied else self.shape.embedding_params)
        if self.tuner == "lora":
            return sum(count * kind.adapter_block_params for kind, count in self.count_kinds())
        return sum(count * kind.block_params for kind, count in self.count_kinds(self.trained_blocks))

    @cached_property
    def frozen_params(self) -> int:
        """Number of parameters without a gradient."""
        return self.params - (0 if self.tuner == "lora" else self._trained_text_params) + self.frozen_tower_params

    @cached_property
    def frozen_tower_params(self) -> int:
        """Those of them that are the tower's or the projector's."""
        return self.shape.tower_params - (0 if self.tuner == "lora" else self._trained_tower_params)

    @cached_property
    def root_params(self) -> int:
        """Parameters that FSDP gathers for the whole pass: those outside the decoder's blocks."""
        return self.outside_params + self.shape.tower_params


def resolve_tuner(job: Any) -> tuple[TunerName, int]:
    """Return the tuner and the LoRA rank; `auto` continues with LoRA if the model is an adapter."""
    if not hasattr(job, "tuner"):
        return "full", 0
    file = find_model_folder(Path(job.model).expanduser()) / ADAPTER_CONFIG_FILE
    if job.tuner not in ("auto", "lora") or not file.is_file() or (file.parent / "config.json").is_file():
        return ("full" if job.tuner == "auto" else job.tuner), job.lora.r
    try:
        rank = json_reader.read_json_file(file)["r"]
        return "lora", int(rank)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read: {error!r}", "check the file") from None


def build_setup(
    job: Any,
    shape: DecoderShape,
    ranks: int,
    row: Any,
    half: bool,
    micro_tokens: int,
    micro_steps: int,
    pictures: PictureLoad | None = None,
) -> TrainingSetup:
    """Build the setup of a resolved job that trains a language model.

    Args:
        row: row of the device table.
        half: matrix products run in half precision.
        pictures: of the rows of a model that sees.
    """
    strategy: StrategyName = "single"
    if ranks * job.parallel.context > 1:
        requested = job.parallel.strategy
        strategy = "ddp" if requested in ("auto", "ddp", "single") else requested
    tuner, rank = resolve_tuner(job)
    facts: PlanFacts = job.get_plan_facts()
    parts = tuple(job.vision.train) if isinstance(job, TuneJob) else ()
    parts = parts or (("projector",) if tuner == "full" and shape.tower_params else ())
    return TrainingSetup(
        shape=shape,
        strategy=strategy,
        ranks=ranks,
        context=job.parallel.context,
        context_method=job.parallel.context_method,
        tensor=job.parallel.tensor,
        replicate=job.parallel.replicate if strategy in ("zero2", "zero3") else 1,
        expert=job.parallel.expert,
        pipeline=job.parallel.pipeline,
        pipeline_chunks=job.parallel.pipeline_chunks,
        offload=job.parallel.offload == "cpu" and strategy in ("zero2", "zero3") and row.type != "cpu",
        tuner=tuner,
        rank=rank,
        targets_of_adapters=tuple(job.lora.target_modules) if hasattr(job, "lora") else (),
        last_layers=job.freeze.last_layers if hasattr(job, "freeze") else 0,
        quantize=getattr(job, "quantize", "none"),
        recompute=getattr(job, "recompute", None) or job.model.recompute,
        muon=job.optim.name == "muon",
        weights=job.optim.weights,
        weight_decay=job.optim.weight_decay,
        micro_tokens=micro_tokens,
        micro_steps=micro_steps,
        seq_len=job.batch.resolved_seq_len,
        half=half,
        fused_adamw=row.fused_adamw and job.optim.weights == "fp32",
        chunk_bytes=row.chunk_bytes,
        uses_attention_mask=row.kernels == "npu",
        casts_blocks=row.cast_weights_together,
        indivisible_tokens=facts.indivisible_tokens,
        targets=facts.targets,
        has_lm_head=facts.has_lm_head,
        has_reference=facts.has_reference,
        trains_tower="tower" in parts,
        trains_projector="projector" in parts,
        pictures=pictures,
    )
