"""Time of an optimizer step on paper, by the cost model that the simulated NPU counts with (`cost.py`).

Every operator of a block is listed with its arithmetic and its memory traffic. A device is busy for the sum; the host
needs its time for every launch; gradients and gathered weights travel while blocks compute, and only what does not fit
beside the computation is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from anabatic.plan.cost import Rates, Unit, collective_ns, operator_ns
from anabatic.plan.memory import BUCKET, LEAST_ROWS, gradient_bytes, stream_width, width
from anabatic.plan.setup import Setup

FUSED_BYTES, FLAT_BYTES = 28.0, 140.0
"""That AdamW moves for a number, at once or operator by operator (fifteen of 8 or 12 bytes, `train/adamw.py`)."""
DDP_BUCKET = 25 * 2**20
"""Bytes of gradients that DDP adds at once (torch.nn.parallel.DistributedDataParallel, bucket_cap_mb)."""


@dataclass(frozen=True)
class Clock:
    """One optimizer step, in seconds."""

    compute: float
    """The device's operators."""
    host: float
    """Launches, if nothing else slowed the host."""
    traffic: float
    """Collectives, if nothing ran beside them."""
    exposed: float
    """What of them does not fit beside the computation."""
    update: float
    """The part of `compute` that is the optimizer's."""
    flops: float
    """Operations of the model, nothing counted twice: what model FLOPs utilisation is measured by."""
    tokens: int
    """Of all ranks."""

    @property
    def step(self) -> float:
        """Seconds."""
        return max(self.compute, self.host) + self.exposed


Op = tuple[Unit, float, float]
"""Unit, operations, bytes moved."""


def _matmul(t: float, inputs: float, outputs: float, w: int) -> Op:
    return (
        "cube half" if w == 2 else "cube single",
        2.0 * t * inputs * outputs,
        w * (t * (inputs + outputs) + inputs * outputs),
    )


def _forward(setup: Setup) -> Iterator[Op]:
    """One block."""
    s, t, w, wide = setup.shape, float(setup.micro_tokens), width(setup), stream_width(setup)
    part = 1 / setup.tensor
    queries, keys = s.heads * s.head_dim * part, s.kv_heads * s.head_dim * part
    for _ in range(s.norms):
        yield "vector", 0.0, t * s.hidden * 2 * wide
        if wide != w:  # what follows takes it in half precision
            yield "vector", 0.0, t * s.hidden * (wide + w)
    if setup.half and setup.weights == "fp32" and setup.tuner != "lora" and not setup.sharded:  # weights are cast
        share = min(1.0, setup.trained_blocks / s.layers)
        yield from [("vector", 0.0, 6.0 * share * inputs * outputs) for inputs, outputs in map(setup.sides, s.linears)]
    for layer in s.linears:
        yield _matmul(t, *setup.sides(layer), w)
    if setup.tuner == "lora":
        for inputs, outputs in map(setup.sides, setup.adapted):
            yield _matmul(t, inputs, setup.rank, w)
            unit, flops, moved = _matmul(t, setup.rank, outputs, w)
            yield unit, flops, moved + w * t * outputs  # added to what is there
    if s.experts:
        yield "vector", 0.0, 4 * w * t * s.chosen * s.hidden
        yield _matmul(t * s.chosen, s.hidden, 2 * s.expert_inner, w)
        yield _matmul(t * s.chosen, s.expert_inner, s.hidden, w)
    for _ in range(2 if s.head_norms else 1):
        yield "vector", 0.0, 2 * w * t * queries
        yield "vector", 0.0, 2 * w * t * keys
    scores = 2.0 * t * setup.seq_len / 2 * queries * 2  # causal: half of the square, two products
    yield "cube half" if w == 2 else "cube single", scores, w * t * (2 * queries + 2 * keys)
    inner = (s.inner if not s.experts else s.chosen * s.expert_inner) * part
    yield "vector", 0.0, w * t * 4 * inner
    yield "vector", 0.0, w * t * 3 * inner
    for _ in range(2):
        yield "vector", 0.0, t * s.hidden * (2 * wide + w)


def _adapter_gradients(setup: Setup) -> Iterator[Op]:
    """Of one block: two products for each adapter, and none for the frozen weight beside it (`models/lora.py`)."""
    t, w = float(setup.micro_tokens), width(setup)
    for inputs, outputs in map(setup.sides, setup.adapted if setup.tuner == "lora" else []):
        yield _matmul(t, inputs, setup.rank, w)
        yield _matmul(t, setup.rank, outputs, w)


def _seconds(ops: Iterator[Op] | list[Op], rates: Rates) -> tuple[float, int]:
    """Of the device, and how many operators they are."""
    found = list(ops)
    return sum(operator_ns(rates, unit, flops, moved) for unit, flops, moved in found) / 1e9, len(found)


def clock(setup: Setup, rates: Rates) -> Clock:
    """Return the time of one optimizer step of all ranks."""
    s, w, t = setup.shape, width(setup), float(setup.micro_tokens)
    block, operators = _seconds(_forward(setup), rates)
    trained = 1.0 if setup.tuner == "full" else setup.trained_blocks / s.layers
    again = {"none": 0.0, "selective": 0.25, "full": 1.0}[setup.recompute]
    reached = setup.held_blocks / s.layers  # below the first block that is trained nothing goes back
    factor = 1 + (again + 1) * reached + trained  # forward, again, gradients of what comes in, gradients of weights
    factor += setup.reference  # it answers first
    learned = t * setup.targets
    rows = min(learned, max(LEAST_ROWS, setup.chunk_bytes // (4 * s.vocab)))
    chunks = max(1.0, learned / max(rows, 1.0))
    products = 3 if setup.tuner == "full" else 2
    head_ops = [_matmul(rows, s.hidden, s.vocab, w)] * products + [("vector", 0.0, 8.0 * rows * s.vocab)] * 5
    head, head_count = _seconds(head_ops if setup.words else [], rates)
    heads = 1 + setup.reference / 3
    update, update_count = _update(setup, rates)
    passes = setup.micro_steps
    adapters, adapter_count = _seconds(_adapter_gradients(setup), rates)
    compute = passes * (s.layers * (block * factor + adapters) + chunks * head * heads) + update
    counted = s.layers * (operators * (factor + 0.2) + adapter_count)
    launches = passes * (counted + chunks * head_count * heads) + update_count
    traffic, exposed = _traffic(setup, rates, s.layers * block, factor)
    used = s.multiplying - (0 if setup.words else s.embedding)
    per_token = 2.0 * used * 2 + 2.0 * (used if setup.tuner == "full" else setup.trained)
    per_token += 12.0 * s.layers * s.heads * s.head_dim * setup.seq_len / 2
    tokens = int(t * passes) * setup.ranks
    return Clock(compute, launches * rates.host_ns / 1e9, traffic, exposed, update, per_token * tokens, tokens)


def _update(setup: Setup, rates: Rates) -> tuple[float, int]:
    """AdamW reads weight, gradient and moments, and writes three of them; flat buckets make twenty operators.

    Gradients of products in half precision are cast, too, and the norm of all is taken.
    """
    share = setup.ranks if setup.sharded else 1
    own = setup.trained / share
    if setup.offload:
        return 2 * (4.0 * own) / rates.host_link + 28 * own / 2e10, 20
    if setup.muon and setup.tuner != "lora":
        return _orthogonal(setup, rates)
    buckets = max(1, round(own / BUCKET))
    cast = 6.0 if setup.half and setup.tuner != "lora" else 0.0
    moved = own * ((FUSED_BYTES if setup.fused_adamw else FLAT_BYTES) + 4.0 + cast)
    return moved / rates.memory, buckets * (2 if setup.fused_adamw else 20)


def _orthogonal(setup: Setup, rates: Rates) -> tuple[float, int]:
    """Muon's five iterations of three products over each matrix of the blocks (`train/optim.py`), equal ones in one
    stack, divided among the ranks; their momentum, the decay and the step move some numbers, too."""
    seconds, launches = 0.0, 0
    for rows, columns in map(setup.sides, setup.shape.linears):
        least, most = sorted((rows, columns))
        flops = 5 * (4.0 * least * least * most + 2.0 * least**3) * setup.trained_blocks / setup.world
        moved = 5 * 12.0 * width(setup) * least * most * setup.trained_blocks / setup.world
        unit: Unit = "cube half" if setup.half else "cube single"
        seconds += (
            operator_ns(rates, unit, flops, moved) / 1e9 + 28.0 * rows * columns * setup.trained_blocks / rates.memory
        )
        launches += 25
    return seconds, launches


def _traffic(setup: Setup, rates: Rates, forward: float, factor: float) -> tuple[float, float]:
    """Return seconds of collectives of a step, and those that no computation hides.

    Nothing hides the first weights that are gathered and the last gradients that are added.
    """
    s, w = setup.shape, width(setup)
    total = exposed = 0.0
    if setup.tensor > 1:  # two sums a block forward, two backward, waited for
        one = collective_ns(rates, "all_reduce", w * setup.micro_tokens * s.hidden, setup.tensor) / 1e9
        total = exposed = 4 * s.layers * one * setup.micro_steps
    if setup.ranks == 1:
        return total, exposed
    own = replace(rates, server=max(1, rates.server // setup.tensor))  # tensor ranks are neighbours (parallel/world.py)
    if setup.strategy == "ddp":
        size = gradient_bytes(setup) * setup.trained
        buckets = max(1, math.ceil(size / DDP_BUCKET))
        one = collective_ns(own, "all_reduce", size / buckets, setup.ranks) / 1e9
        beside = forward * (factor - 1) if setup.tensor == 1 else 0.0  # with tensor ranks after the backward pass
        return total + buckets * one, exposed + max(one, buckets * one - beside)
    block, first = _sharded(setup, own)
    passes = setup.micro_steps
    seconds = passes * (s.layers * block + first)
    return total + seconds, exposed + max(passes * first, seconds - passes * forward * factor)


def _sharded(setup: Setup, rates: Rates) -> tuple[float, float]:
    """Return the seconds that a block's weights and gradients travel in a forward and backward pass, and those of what
    lies outside the blocks: each is gathered and added by itself (`parallel/shard.py`), sums in fp32."""
    s, w = setup.shape, width(setup)
    adapters = setup.adapter_block if setup.tuner == "lora" else 0
    blocks_trained = s.layers if setup.tuner == "lora" else setup.trained_blocks
    inside = setup.trained / blocks_trained if setup.tuner != "full" else float(setup.block)
    outside = max(0.0, setup.trained - inside * blocks_trained)
    gathers = 2 if setup.strategy == "zero3" else 1

    def travel(weights: float, gradients: float) -> float:
        gather = gathers * collective_ns(rates, "all_gather", w * weights, setup.ranks)
        return (gather + collective_ns(rates, "reduce_scatter", 4.0 * gradients, setup.ranks) * (gradients > 0)) / 1e9

    block = travel(setup.block + adapters, inside * blocks_trained / s.layers)
    return block, travel(s.outside, outside)
