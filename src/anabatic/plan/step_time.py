"""Estimated time of an optimizer step, by the cost model that the simulated NPU counts with (`cost_model.py`).

Every operator of a block is listed with its arithmetic and its memory traffic. A device is busy for the sum; the host
needs its time for every launch; gradients and gathered weights travel while blocks compute, and only what does not fit
beside the computation is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from anabatic.plan.cost_model import ChipRates, ComputeUnit, estimate_collective_ns, estimate_operator_ns
from anabatic.plan.memory_estimate import (
    MIN_LOGIT_ROWS,
    UPDATE_BUCKET_ELEMENTS,
    get_compute_width,
    get_gradient_bytes,
    get_stream_width,
)
from anabatic.plan.training_setup import TrainingSetup

FUSED_BYTES, FLAT_BYTES = 28.0, 140.0
"""That AdamW moves for a number, at once or operator by operator (fifteen of 8 or 12 bytes, `train/optim/adamw.py`)."""
DDP_BUCKET = 25 * 2**20
"""Bytes of gradients that DDP adds at once (torch.nn.parallel.DistributedDataParallel, bucket_cap_mb)."""


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, in seconds."""

    compute: float
    """The device's operators."""
    launches: float
    """Launches, if nothing else slowed the host."""
    collectives: float
    """Collectives, if nothing ran beside them."""
    exposed_collectives: float
    """What of them does not fit beside the computation."""
    update: float
    """The part of `compute` that is the optimizer's."""
    flops: float
    """Operations of the model, nothing counted twice: what model FLOPs utilisation is measured by."""
    tokens: int
    """Of all ranks."""

    @property
    def total_seconds(self) -> float:
        """Seconds."""
        return max(self.compute, self.launches) + self.exposed_collectives


Operator = tuple[ComputeUnit, float, float]
"""Unit, operations, bytes moved."""


def _matmul_operator(t: float, inputs: float, outputs: float, w: int) -> Operator:
    return (
        "cube half" if w == 2 else "cube single",
        2.0 * t * inputs * outputs,
        w * (t * (inputs + outputs) + inputs * outputs),
    )


def _forward_operators(setup: TrainingSetup) -> Iterator[Operator]:
    """One block."""
    s, t, w, wide = setup.shape, float(setup.micro_tokens), get_compute_width(setup), get_stream_width(setup)
    part = 1 / setup.tensor
    queries, keys = s.heads * s.head_dim * part, s.kv_heads * s.head_dim * part
    for _ in range(s.norms):
        yield "vector", 0.0, t * s.hidden * 2 * wide
        if wide != w:  # what follows takes it in half precision
            yield "vector", 0.0, t * s.hidden * (wide + w)
    if setup.half and setup.weights == "fp32" and setup.tuner != "lora" and not setup.is_sharded:  # weights are cast
        share = min(1.0, setup.trained_blocks / s.layers)
        yield from [
            ("vector", 0.0, 6.0 * share * inputs * outputs) for inputs, outputs in map(setup.get_local_shape, s.linears)
        ]
    for layer in s.linears:
        yield _matmul_operator(t, *setup.get_local_shape(layer), w)
    if setup.tuner == "lora":
        for inputs, outputs in map(setup.get_local_shape, setup.adapted_linears):
            yield _matmul_operator(t, inputs, setup.rank, w)
            unit, flops, moved = _matmul_operator(t, setup.rank, outputs, w)
            yield unit, flops, moved + w * t * outputs  # added to what is there
    if s.experts:
        yield "vector", 0.0, 4 * w * t * s.experts_per_token * s.hidden
        yield _matmul_operator(t * s.experts_per_token, s.hidden, 2 * s.expert_inner, w)
        yield _matmul_operator(t * s.experts_per_token, s.expert_inner, s.hidden, w)
    for _ in range(2 if s.head_norms else 1):
        yield "vector", 0.0, 2 * w * t * queries
        yield "vector", 0.0, 2 * w * t * keys
    scores = 2.0 * t * setup.seq_len / 2 * queries * 2  # causal: half of the square, two products
    yield "cube half" if w == 2 else "cube single", scores, w * t * (2 * queries + 2 * keys)
    inner = (s.inner if not s.experts else s.experts_per_token * s.expert_inner) * part
    yield "vector", 0.0, w * t * 4 * inner
    yield "vector", 0.0, w * t * 3 * inner
    for _ in range(2):
        yield "vector", 0.0, t * s.hidden * (2 * wide + w)


def _adapter_gradient_operators(setup: TrainingSetup) -> Iterator[Operator]:
    """Of one block: two products for each adapter, and none for the frozen weight beside it
    (`models/lora/linear.py`)."""
    t, w = float(setup.micro_tokens), get_compute_width(setup)
    for inputs, outputs in map(setup.get_local_shape, setup.adapted_linears if setup.tuner == "lora" else []):
        yield _matmul_operator(t, inputs, setup.rank, w)
        yield _matmul_operator(t, setup.rank, outputs, w)


def _sum_operators(ops: Iterator[Operator] | list[Operator], rates: ChipRates) -> tuple[float, int]:
    """Of the device, and how many operators they are."""
    found = list(ops)
    return sum(estimate_operator_ns(rates, unit, flops, moved) for unit, flops, moved in found) / 1e9, len(found)


def estimate_step_time(setup: TrainingSetup, rates: ChipRates) -> StepTime:
    """Return the time of one optimizer step of all ranks."""
    s, w, t = setup.shape, get_compute_width(setup), float(setup.micro_tokens)
    block, operators = _sum_operators(_forward_operators(setup), rates)
    trained = 1.0 if setup.tuner == "full" else setup.trained_blocks / s.layers
    again = {"none": 0.0, "selective": 0.25, "full": 1.0}[setup.recompute]
    reached = setup.blocks_with_activations / s.layers  # below the first block that is trained nothing goes back
    factor = 1 + (again + 1) * reached + trained  # forward, again, gradients of what comes in, gradients of weights
    factor += setup.reference  # it answers first
    learned = t * setup.targets
    rows = min(learned, max(MIN_LOGIT_ROWS, setup.chunk_bytes // (4 * s.vocab)))
    chunks = max(1.0, learned / max(rows, 1.0))
    products = 3 if setup.tuner == "full" else 2
    head_ops = [_matmul_operator(rows, s.hidden, s.vocab, w)] * products + [("vector", 0.0, 8.0 * rows * s.vocab)] * 5
    head, head_count = _sum_operators(head_ops if setup.words else [], rates)
    heads = 1 + setup.reference / 3
    update, update_count = _estimate_update(setup, rates)
    passes = setup.micro_steps
    adapters, adapter_count = _sum_operators(_adapter_gradient_operators(setup), rates)
    compute = passes * (s.layers * (block * factor + adapters) + chunks * head * heads) + update
    counted = s.layers * (operators * (factor + 0.2) + adapter_count)
    launches = passes * (counted + chunks * head_count * heads) + update_count
    traffic, exposed = _estimate_collectives(setup, rates, s.layers * block, factor)
    used = s.multiplying_params - (0 if setup.words else s.embedding_params)
    per_token = 2.0 * used * 2 + 2.0 * (used if setup.tuner == "full" else setup.trained_params)
    per_token += 12.0 * s.layers * s.heads * s.head_dim * setup.seq_len / 2
    tokens = int(t * passes) * setup.ranks
    return StepTime(compute, launches * rates.host_ns / 1e9, traffic, exposed, update, per_token * tokens, tokens)


def _estimate_update(setup: TrainingSetup, rates: ChipRates) -> tuple[float, int]:
    """AdamW reads weight, gradient and moments, and writes three of them; flat buckets make twenty operators.

    Gradients of products in half precision are cast, too, and the norm of all is taken.
    """
    share = setup.ranks if setup.is_sharded else 1
    own = setup.trained_params / share
    if setup.offload:
        return 2 * (4.0 * own) / rates.host_link + 28 * own / 2e10, 20
    if setup.muon and setup.tuner != "lora":
        return _estimate_muon(setup, rates)
    buckets = max(1, round(own / UPDATE_BUCKET_ELEMENTS))
    cast = 6.0 if setup.half and setup.tuner != "lora" else 0.0
    moved = own * ((FUSED_BYTES if setup.fused_adamw else FLAT_BYTES) + 4.0 + cast)
    return moved / rates.memory, buckets * (2 if setup.fused_adamw else 20)


def _estimate_muon(setup: TrainingSetup, rates: ChipRates) -> tuple[float, int]:
    """Muon's five iterations of three products over each matrix of the blocks (`train/optim/optimizer.py`), equal ones
    in one stack, divided among the ranks; their momentum, the decay and the step move some numbers, too."""
    seconds, launches = 0.0, 0
    for rows, columns in map(setup.get_local_shape, setup.shape.linears):
        least, most = sorted((rows, columns))
        flops = 5 * (4.0 * least * least * most + 2.0 * least**3) * setup.trained_blocks / setup.world_size
        moved = 5 * 12.0 * get_compute_width(setup) * least * most * setup.trained_blocks / setup.world_size
        unit: ComputeUnit = "cube half" if setup.half else "cube single"
        seconds += (
            estimate_operator_ns(rates, unit, flops, moved) / 1e9
            + 28.0 * rows * columns * setup.trained_blocks / rates.memory
        )
        launches += 25
    return seconds, launches


def _estimate_collectives(setup: TrainingSetup, rates: ChipRates, forward: float, factor: float) -> tuple[float, float]:
    """Return seconds of collectives of a step, and those that no computation hides.

    Nothing hides the first weights that are gathered and the last gradients that are added.
    """
    s, w = setup.shape, get_compute_width(setup)
    total = exposed = 0.0
    if setup.tensor > 1:  # two sums a block forward, two backward, waited for
        one = estimate_collective_ns(rates, "all_reduce", w * setup.micro_tokens * s.hidden, setup.tensor) / 1e9
        total = exposed = 4 * s.layers * one * setup.micro_steps
    if setup.ranks == 1:
        return total, exposed
    own = replace(
        rates, server=max(1, rates.server // setup.tensor)
    )  # tensor ranks are neighbours (parallel/process_groups.py)
    if setup.strategy == "ddp":
        size = get_gradient_bytes(setup) * setup.trained_params
        buckets = max(1, math.ceil(size / DDP_BUCKET))
        one = estimate_collective_ns(own, "all_reduce", size / buckets, setup.ranks) / 1e9
        beside = forward * (factor - 1) if setup.tensor == 1 else 0.0  # with tensor ranks after the backward pass
        return total + buckets * one, exposed + max(one, buckets * one - beside)
    block, first = _estimate_sharded(setup, own)
    passes = setup.micro_steps
    seconds = passes * (s.layers * block + first)
    return total + seconds, exposed + max(passes * first, seconds - passes * forward * factor)


def _estimate_sharded(setup: TrainingSetup, rates: ChipRates) -> tuple[float, float]:
    """Return the seconds that a block's weights and gradients travel in a forward and backward pass, and those of what
    lies outside the blocks: each is gathered and added by itself (`parallel/sharding.py`), sums in fp32."""
    s, w = setup.shape, get_compute_width(setup)
    adapters = setup.adapter_block_params if setup.tuner == "lora" else 0
    blocks_trained = s.layers if setup.tuner == "lora" else setup.trained_blocks
    inside = setup.trained_params / blocks_trained if setup.tuner != "full" else float(setup.block_params)
    outside = max(0.0, setup.trained_params - inside * blocks_trained)
    gathers = 2 if setup.strategy == "zero3" else 1

    def travel_seconds(weights: float, gradients: float) -> float:
        gather = gathers * estimate_collective_ns(rates, "all_gather", w * weights, setup.ranks)
        return (
            gather + estimate_collective_ns(rates, "reduce_scatter", 4.0 * gradients, setup.ranks) * (gradients > 0)
        ) / 1e9

    block = travel_seconds(setup.block_params + adapters, inside * blocks_trained / s.layers)
    return block, travel_seconds(s.outside_params, outside)
