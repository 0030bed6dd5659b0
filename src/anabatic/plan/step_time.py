"""Estimated time of an optimizer step, with the cost model of the simulated NPU (`cost_model.py`).

Every operator of a block is listed with its arithmetic and its memory traffic. The device time is the sum; the host
needs time for every launch; collectives of gradients and weights overlap with the computation, and only their exposed
part is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from anabatic.plan.cost_model import (
    ChipRates,
    ComputeUnit,
    estimate_collective_ns,
    estimate_operator_ns,
    separate_ranks,
)
from anabatic.plan.memory_estimate import (
    MIN_LOGIT_ROWS,
    UPDATE_BUCKET_ELEMENTS,
    get_compute_width,
    get_gradient_bytes,
    get_stream_width,
)
from anabatic.plan.pipeline_stages import list_stages
from anabatic.plan.shapes.attention_kinds import DeltaAttention, LatentAttention
from anabatic.plan.tower_cost import count_tower_work
from anabatic.plan.training_setup import TrainingSetup

FUSED_BYTES, FLAT_BYTES = 28.0, 140.0
"""Memory traffic of AdamW per parameter, fused or operator by operator (fifteen of 8 or 12 bytes,
`train/optim/adamw.py`)."""
_ROUTER_OPERATORS = 11
"""Operators of a forward pass that choose experts and count and sort their rows: the device hardly needs time for them,
the host does. Measured on the simulated NPU: 481 launches of a step of four blocks, of which 335 were counted without
(`benchmarks/plan.py`, experts with ddp)."""
DDP_BUCKET = 25 * 2**20
"""Bytes of a gradient bucket of DDP (torch.nn.parallel.DistributedDataParallel, bucket_cap_mb)."""


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, in seconds."""

    compute: float
    """Operators of the device."""
    launches: float
    """Launches from the host."""
    collectives: float
    """Collectives without overlap."""
    exposed_collectives: float
    """Collectives that the computation does not hide."""
    waiting: float
    """A pipeline's stage waits for the others while it fills and drains."""
    update: float
    """The optimizer's part of `compute`."""
    flops: float
    """Floating-point operations of the model without recomputation: the numerator of model FLOPs utilisation."""
    tokens: int
    """Tokens of all ranks."""

    @property
    def total_seconds(self) -> float:
        """Seconds of the step."""
        return max(self.compute, self.launches) + self.exposed_collectives + self.waiting


Operator = tuple[ComputeUnit, float, float]
"""Unit, operations, bytes moved."""


def _matmul_operator(tokens: float, inputs: float, outputs: float, width: int) -> Operator:
    return (
        "cube half" if width == 2 else "cube single",
        2.0 * tokens * inputs * outputs,
        width * (tokens * (inputs + outputs) + inputs * outputs),
    )


def _forward_operators(setup: TrainingSetup) -> Iterator[Operator]:
    """Yield the operators of the forward pass of one block."""
    s, t, width, stream_width = (
        setup.shape,
        float(setup.local_tokens),
        get_compute_width(setup),
        get_stream_width(setup),
    )
    tensor_fraction = 1 / setup.tensor
    for _ in range(s.norms):
        yield "vector", 0.0, t * s.hidden * 2 * stream_width
        if stream_width != width:  # the next operator takes it in half precision
            yield "vector", 0.0, t * s.hidden * (stream_width + width)
    if setup.half and setup.weights == "fp32" and setup.tuner != "lora" and not setup.is_sharded:  # weights are cast
        trained_fraction = min(1.0, setup.trained_blocks / s.layers)
        yield from [
            ("vector", 0.0, 6.0 * trained_fraction * inputs * outputs)
            for inputs, outputs in map(setup.get_local_shape, s.linears)
        ]
    for layer in s.linears:
        yield _matmul_operator(t, *setup.get_local_shape(layer), width)
    if setup.tuner == "lora":
        for inputs, outputs in map(setup.get_local_shape, setup.adapted_linears):
            yield _matmul_operator(t, inputs, setup.rank, width)
            unit, flops, bytes_moved = _matmul_operator(t, setup.rank, outputs, width)
            yield unit, flops, bytes_moved + width * t * outputs  # added to the output
    if s.experts:
        yield "vector", 0.0, 4 * width * t * s.experts_per_token * s.hidden
        yield _matmul_operator(t * s.experts_per_token, s.hidden, 2 * s.expert_inner, width)
        yield _matmul_operator(t * s.experts_per_token, s.expert_inner, s.hidden, width)
    yield from _mixing_operators(setup)
    inner = (s.inner if not s.experts else s.experts_per_token * s.expert_inner + s.shared_inner) * tensor_fraction
    yield "vector", 0.0, width * t * 4 * inner
    yield "vector", 0.0, width * t * 3 * inner
    for _ in range(2):
        yield "vector", 0.0, t * s.hidden * (2 * stream_width + width)


def _mixing_operators(setup: TrainingSetup) -> Iterator[Operator]:
    """Yield the operators between the projections of an attention: rotation, norms of heads, products of tokens."""
    s, t, width = setup.shape, float(setup.local_tokens), get_compute_width(setup)
    if (other := setup.attention) is not None:
        for product in other.iter_products(setup.seq_len):
            is_half = product.unit == "half" and width == 2
            unit: ComputeUnit = "cube half" if is_half else "cube single"
            bytes_moved = (width if is_half else 4) * t * product.elements
            yield unit, t * product.flops / setup.tensor, bytes_moved / setup.tensor
        yield "vector", 0.0, width * t * other.count_vector_elements() / setup.tensor
        return
    queries, keys = s.heads * s.head_dim / setup.tensor, s.kv_heads * s.head_dim / setup.tensor
    for _ in range(2 if s.head_norms else 1):
        yield "vector", 0.0, 2 * width * t * queries
        yield "vector", 0.0, 2 * width * t * keys
    scores = t * s.count_mixing_flops(setup.seq_len) / setup.tensor
    yield "cube half" if width == 2 else "cube single", scores, width * t * (2 * queries + 2 * keys)
    if s.gates_output:
        yield "vector", 0.0, width * t * 3 * queries


def _adapter_gradient_operators(setup: TrainingSetup) -> Iterator[Operator]:
    """Yield the weight-gradient operators of one block: two products per adapter, none for the frozen weight
    (`models/lora/linear.py`)."""
    t, width = float(setup.local_tokens), get_compute_width(setup)
    for inputs, outputs in map(setup.get_local_shape, setup.adapted_linears if setup.tuner == "lora" else []):
        yield _matmul_operator(t, inputs, setup.rank, width)
        yield _matmul_operator(t, setup.rank, outputs, width)


def _sum_operators(ops: Iterator[Operator] | list[Operator], rates: ChipRates) -> tuple[float, int]:
    """Return the seconds on the device and the number of operators."""
    operators = list(ops)
    return sum(
        estimate_operator_ns(rates, unit, flops, bytes_moved) for unit, flops, bytes_moved in operators
    ) / 1e9, len(operators)


class _BlockTimes(NamedTuple):
    """Seconds and operators of all blocks: a forward pass, and the gradients of adapters."""

    seconds: float
    operators: int
    adapter_seconds: float
    adapter_operators: int


def _sum_kinds(setup: TrainingSetup, rates: ChipRates) -> _BlockTimes:
    seconds, operators, adapter_seconds, adapter_operators = 0.0, 0, 0.0, 0
    for kind, count in setup.count_kinds():
        block, block_operators = _sum_operators(_forward_operators(kind), rates)
        adapters, adapter_count = _sum_operators(_adapter_gradient_operators(kind), rates)
        seconds += count * block
        operators += count * (block_operators + _ROUTER_OPERATORS * (kind.shape.experts > 0))
        adapter_seconds += count * adapters
        adapter_operators += count * adapter_count
    return _BlockTimes(seconds, operators, adapter_seconds, adapter_operators)


def estimate_step_time(setup: TrainingSetup, rates: ChipRates) -> StepTime:
    """Return the time of one optimizer step of all ranks.

    Of a pipeline that of the slowest stage, which all others wait for: of m micro-batches each stage computes all, and
    one passes through the other stages before and after them, of several chunks through one of each stage (1F1B;
    arXiv 2104.04473, section 2.2).
    """
    if setup.pipeline == 1 or setup.stage is not None:
        return _estimate_part(setup, rates)
    parts = [_estimate_part(stage, rates) for stage in (list_stages(setup) if setup.has_stages else [setup])]
    seconds = [max(part.compute - part.update, part.launches) for part in parts]
    slowest = parts[seconds.index(max(seconds))]
    chunks = setup.pipeline_chunks
    waiting = (sum(seconds) - max(seconds)) / (setup.micro_steps * chunks)
    passing = 2 * (setup.micro_steps * chunks + setup.pipeline - 1) * _estimate_stage_send(setup, rates)
    return replace(
        slowest,
        waiting=waiting,
        update=max(part.update for part in parts),
        collectives=max(part.collectives for part in parts) + passing,
        exposed_collectives=max(part.exposed_collectives for part in parts) + passing,
        flops=_estimate_part(replace(setup, pipeline=1), rates).flops,
    )


def _estimate_stage_send(setup: TrainingSetup, rates: ChipRates) -> float:
    """Return the seconds in which a stage hands the states of a micro-batch to the next one, or their gradients back.

    Stages are as many ranks apart as there are copies of one, so that some neighbours are on two machines as soon as
    the job is.
    """
    size = float(get_stream_width(setup) * setup.shape.hidden * setup.local_tokens)
    if setup.world_size <= rates.server:  # some neighbours of several are on two cards
        neighbours = separate_ranks(rates, setup.world_size - 1)
        return estimate_collective_ns(neighbours, "send", size, 2) / 1e9
    return (rates.launch_collective_ns + rates.network_ns) / 1e9 + size / rates.network


def _estimate_part(setup: TrainingSetup, rates: ChipRates) -> StepTime:
    s, w, t = setup.shape, get_compute_width(setup), float(setup.local_tokens)
    blocks = _sum_kinds(setup, rates)
    trained_fraction = 1.0 if setup.tuner == "full" else setup.trained_blocks / s.layers
    recomputed_fraction = {"none": 0.0, "selective": 0.25, "full": 1.0}[setup.recompute]
    backward_fraction = setup.blocks_with_activations / s.layers  # no backward pass below the first trained block
    factor = (
        1 + (recomputed_fraction + 1) * backward_fraction + trained_fraction
    )  # forward, recomputation, input gradients, weight gradients
    factor += setup.has_reference  # forward pass of the reference model
    target_tokens = t * setup.targets
    rows = min(target_tokens, max(MIN_LOGIT_ROWS, setup.chunk_bytes // (4 * s.vocab)))
    chunks = max(1.0, target_tokens / max(rows, 1.0))
    products = 3 if setup.tuner == "full" else 2
    head_ops = [_matmul_operator(rows, s.hidden, s.vocab, w)] * products + [("vector", 0.0, 8.0 * rows * s.vocab)] * 5
    head, head_count = _sum_operators(head_ops if setup.has_lm_head else [], rates)
    head_factor = 1 + setup.has_reference / 3
    update, update_count = _estimate_update(setup, rates)
    passes = setup.micro_steps
    tower = _estimate_tower(setup, rates)
    compute = passes * (blocks.seconds * factor + blocks.adapter_seconds + chunks * head * head_factor) + update
    compute += passes * tower.seconds
    block_launches = blocks.operators * (factor + 0.2) + blocks.adapter_operators
    launches = passes * (block_launches + chunks * head_count * head_factor + tower.operators) + update_count
    traffic, exposed = _estimate_collectives(setup, rates, blocks.seconds, factor)
    used_params = s.multiplying_params - (0 if setup.has_lm_head else s.embedding_params)
    flops_per_token = 2.0 * used_params * 2 + 2.0 * (used_params if setup.tuner == "full" else setup.trained_params)
    flops_per_token += 3.0 * sum(count * kind.count_mixing_flops(setup.seq_len) for kind, count in s.count_kinds())
    tokens = setup.micro_tokens * passes * setup.ranks
    flops = flops_per_token * tokens + tower.flops * passes * setup.ranks
    return StepTime(compute, launches * rates.host_ns / 1e9, traffic, exposed, 0.0, update, flops, tokens)


class _TowerTimes(NamedTuple):
    """Seconds, launches and operations of tower and projector in a micro-batch, backward pass included."""

    seconds: float = 0.0
    operators: float = 0.0
    flops: float = 0.0


def _estimate_tower(setup: TrainingSetup, rates: ChipRates) -> _TowerTimes:
    work = count_tower_work(setup)
    if work is None:
        return _TowerTimes()
    width = get_compute_width(setup)
    unit: ComputeUnit = "cube half" if width == 2 else "cube single"
    small: list[Operator] = [("vector", 0.0, width * work.vectors / work.operators)] * work.operators
    mixing: Operator = (unit, work.mixing, 4.0 * width * work.blocks[0][0] * work.blocks[0][1])
    products = [_matmul_operator(rows, int(inputs), int(outputs), width) for rows, inputs, outputs in work.blocks]
    block, block_count = _sum_operators([*products, mixing, *small], rates)
    projector, projector_count = _sum_operators([_matmul_operator(*sizes, width) for sizes in work.projector], rates)
    weights = 2.0 if setup.tuner == "full" else 1.0  # gradients of inputs, and of whole weights
    again = setup.recompute != "none"
    tower_factor = 1 + (weights + again) * setup.trains_tower
    projector_factor = 1 + weights * (setup.trains_tower or setup.trains_projector)
    tower_flops, projector_flops = work.flops
    return _TowerTimes(
        work.depth * block * tower_factor + projector * projector_factor,
        work.depth * block_count * tower_factor + projector_count * projector_factor,
        tower_flops * (1 + weights * setup.trains_tower) + projector_flops * projector_factor,
    )


def _estimate_update(setup: TrainingSetup, rates: ChipRates) -> tuple[float, int]:
    """Return seconds and launches of the update.

    AdamW reads weight, gradient and moments, and writes three of them; a flat bucket takes twenty operators. Gradients
    of half-precision products are also cast, and the gradient norm is computed.
    """
    num_shards = setup.shard_ranks if setup.is_sharded else 1
    local_params = setup.trained_params / num_shards
    if setup.offload:
        return 2 * (4.0 * local_params) / rates.host_link + 28 * local_params / 2e10, 20
    if setup.muon and setup.tuner != "lora":
        return _estimate_muon(setup, rates)
    buckets = max(1, round(local_params / UPDATE_BUCKET_ELEMENTS))
    cast = 6.0 if setup.half and setup.tuner != "lora" else 0.0
    bytes_moved = local_params * ((FUSED_BYTES if setup.fused_adamw else FLAT_BYTES) + 4.0 + cast)
    return bytes_moved / rates.memory, buckets * (2 if setup.fused_adamw else 20)


def _estimate_muon(setup: TrainingSetup, rates: ChipRates) -> tuple[float, int]:
    """Return seconds and launches of Muon: five iterations of three products over each matrix of the blocks
    (`train/optim/optimizer.py`), equal matrices stacked and divided among the ranks; plus the memory traffic of
    momentum, decay and step."""
    seconds, launches = 0.0, 0
    shapes = [
        (setup.get_local_shape(layer), count)
        for kind, count in setup.count_kinds(setup.trained_blocks)
        for layer in kind.shape.linears
    ]
    for (rows, columns), count in shapes:
        short_side, long_side = sorted((rows, columns))
        flops = 5 * (4.0 * short_side * short_side * long_side + 2.0 * short_side**3) * count / setup.world_size
        bytes_moved = 5 * 12.0 * get_compute_width(setup) * short_side * long_side * count / setup.world_size
        unit: ComputeUnit = "cube half" if setup.half else "cube single"
        seconds += (
            estimate_operator_ns(rates, unit, flops, bytes_moved) / 1e9 + 28.0 * rows * columns * count / rates.memory
        )
        launches += 25
    return seconds, launches


def _estimate_collectives(
    setup: TrainingSetup, rates: ChipRates, forward_seconds: float, factor: float
) -> tuple[float, float]:
    """Return the seconds of collectives of a step, and the exposed ones.

    The first all-gather of weights and the last reduction of gradients are always exposed.
    """
    s, w = setup.shape, get_compute_width(setup)
    total = exposed = 0.0
    if setup.tensor > 1:  # two all-reduces per block forward, two backward, not overlapped
        seconds_per_call = (
            estimate_collective_ns(rates, "all_reduce", w * setup.local_tokens * s.hidden, setup.tensor) / 1e9
        )
        total = exposed = 4 * s.layers * seconds_per_call * setup.micro_steps
        exchanges = sum(count * _estimate_channel_exchange(kind, rates) for kind, count in setup.count_kinds())
        total = exposed = total + setup.micro_steps * exchanges
    group_rates = separate_ranks(rates, setup.tensor)  # tensor or expert ranks are neighbours (plan/mesh_shape.py)
    if setup.context > 1:
        context_rates = separate_ranks(group_rates, setup.expert)
        exchanges = sum(count * _estimate_exchange(kind, context_rates) for kind, count in setup.count_kinds())
        seconds = setup.micro_steps * exchanges
        total, exposed = total + seconds, exposed + seconds
    if setup.expert > 1:
        exchanges = sum(count * _estimate_expert_exchange(kind, group_rates) for kind, count in setup.count_kinds())
        total, exposed = total + setup.micro_steps * exchanges, exposed + setup.micro_steps * exchanges
    if setup.gradient_ranks == 1:
        return total, exposed
    if setup.strategy == "ddp":
        size = get_gradient_bytes(setup) * setup.trained_params
        buckets = max(1, math.ceil(size / DDP_BUCKET))
        seconds_per_call = estimate_collective_ns(group_rates, "all_reduce", size / buckets, setup.gradient_ranks) / 1e9
        overlap_seconds = (
            forward_seconds * (factor - 1) if setup.tensor == setup.pipeline == 1 else 0.0
        )  # with tensor ranks and stages after the backward pass
        return total + buckets * seconds_per_call, exposed + max(
            seconds_per_call, buckets * seconds_per_call - overlap_seconds
        )
    kinds = [(count, *_estimate_sharded(kind, group_rates)) for kind, count in setup.count_kinds()]
    outer_seconds = kinds[0][2]
    passes = setup.micro_steps
    seconds = passes * (sum(count * block_seconds for count, block_seconds, _ in kinds) + outer_seconds)
    return total + seconds, exposed + max(passes * outer_seconds, seconds - passes * forward_seconds * factor)


def _estimate_exchange(setup: TrainingSetup, rates: ChipRates) -> float:
    """Return the seconds in which context ranks exchange data for attention in one block, forward and backward; nothing
    hides them.

    Ulysses: queries, keys and values in one all-to-all, the output in another (`parallel/context_exchange.py`). Ring:
    keys and values from each other rank, in the backward pass again, and their gradients in fp32
    (`parallel/context_ring.py`). The delta rule, with both: its inputs in one all-to-all, its output in another.
    """
    s, width = setup.shape, get_compute_width(setup)
    queries = s.heads // setup.tensor
    token_bytes = width * s.head_dim
    delta = setup.attention if isinstance(setup.attention, DeltaAttention) else None
    if setup.context_method == "ring" and delta is None:
        keys = 2 * max(1, s.kv_heads // setup.tensor) * s.head_dim * min(setup.seq_len, setup.micro_tokens)
        rounds = setup.context - 1
        send, give_back = (
            rounds * estimate_collective_ns(rates, "send", size * keys / setup.context, setup.context) / 1e9
            for size in (float(width), 4.0)
        )
        backward = setup.blocks_with_activations / s.layers
        return (1 + setup.has_reference) * send + backward * (send * (1 + (setup.recompute != "none")) + give_back)
    value_bytes = width * s.attention.value_dim if isinstance(s.attention, LatentAttention) else token_bytes
    if delta is not None:
        sizes = [float(width * (delta.conv_channels + 2 * delta.value_heads)), float(width * delta.values)]
        sizes = [size / setup.tensor for size in sizes]
    else:
        keys_bytes = setup.repeated_key_heads * (token_bytes + value_bytes)
        sizes = [queries * token_bytes + keys_bytes, queries * value_bytes]
    calls = [
        estimate_collective_ns(rates, "all_to_all", size * setup.local_tokens, setup.context) / 1e9 for size in sizes
    ]
    return _count_exchanges(setup) * sum(calls)


def _count_exchanges(setup: TrainingSetup) -> float:
    """Return how often a step exchanges what a forward pass does: forward, perhaps recomputed, backward."""
    backward_fraction = setup.blocks_with_activations / setup.shape.layers
    return 1 + backward_fraction * (1 if setup.recompute == "none" else 2) + setup.has_reference


def _estimate_channel_exchange(setup: TrainingSetup, rates: ChipRates) -> float:
    """Return the seconds in which tensor ranks exchange the channels of one joint projection of queries, keys and
    values (`models/linear_attention/delta_heads.py`)."""
    attention = setup.shape.attention
    if not isinstance(attention, DeltaAttention) or attention.layout != "split":
        return 0.0
    size = get_compute_width(setup) * setup.local_tokens * attention.conv_channels / setup.tensor
    return _count_exchanges(setup) * estimate_collective_ns(rates, "all_to_all", size, setup.tensor) / 1e9


def _estimate_expert_exchange(setup: TrainingSetup, rates: ChipRates) -> float:
    """Return the seconds in which expert ranks exchange the rows of one block, forward and backward, and nothing hides
    them: one all-to-all to the experts, one back (`parallel/expert_exchange.py`). Routing is assumed to be even."""
    s = setup.shape
    if not s.experts:
        return 0.0
    rows = float(setup.local_tokens) * s.experts_per_token
    size = get_compute_width(setup) * rows * s.hidden
    call = estimate_collective_ns(rates, "all_to_all", size, setup.expert) / 1e9
    backward_fraction = setup.blocks_with_activations / s.layers
    return 2 * call * (1 + backward_fraction * (1 if setup.recompute != "full" else 2) + setup.has_reference)


def _estimate_sharded(setup: TrainingSetup, rates: ChipRates) -> tuple[float, float]:
    """Return the collective seconds of one block in a forward and backward pass, and those of the parameters outside
    the blocks; each unit is gathered and reduced separately (`parallel/sharding.py`), reductions in fp32.

    Offloaded shards come from the host before each gather, as they are stored, and their gradients go there (torch
    2.13, `_fsdp_param.py`, `all_gather_inputs`; `_fsdp_collectives.py`, `foreach_reduce`).
    """
    s, w = setup.shape, get_compute_width(setup)
    blocks_trained = s.layers if setup.tuner == "lora" else setup.trained_blocks
    params_per_block = setup.trained_params / blocks_trained if setup.tuner != "full" else float(setup.block_params)
    outer_params = max(0.0, setup.trained_params - params_per_block * blocks_trained)
    num_gathers = 2 if setup.strategy == "zero3" else 1
    stored_width = w if setup.tuner == "lora" else get_gradient_bytes(setup)

    def travel_seconds(weights: float, gradients: float) -> float:
        gather = num_gathers * estimate_collective_ns(rates, "all_gather", w * weights, setup.shard_ranks)
        if setup.offload:
            moved = num_gathers * stored_width * weights + 4.0 * gradients
            gather += 1e9 * moved / setup.shard_ranks / rates.host_link
        if gradients == 0:
            return gather / 1e9
        reduce = estimate_collective_ns(rates, "reduce_scatter", 4.0 * gradients, setup.shard_ranks)
        if setup.replicate > 1:  # each shard among the copies, which are on other machines
            copy_rates = separate_ranks(rates, setup.shard_ranks)
            shard_bytes = 4.0 * gradients / setup.shard_ranks
            reduce += estimate_collective_ns(copy_rates, "all_reduce", shard_bytes, setup.replicate)
        return (gather + reduce) / 1e9

    reduced = setup.gathered_block_params if setup.tuner == "full" else params_per_block * blocks_trained / s.layers
    block = travel_seconds(setup.gathered_block_params, reduced)
    return block, travel_seconds(setup.root_params, outer_params)
