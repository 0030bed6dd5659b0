"""Memory of a device during one optimizer step, by part and by moment.

Tensors saved for the backward pass are listed one by one, as our operators save them (`estimate_activations`); nothing
is fitted. The peak is the maximum over five moments: the loss, the backward pass of each block, the gradient of the
embedding, the sums of divided experts' gradients, the update. `benchmarks/plan.py` compares it with the allocator's
peak on simulated NPUs.

Letters as in `model_shape.py`; `T` tokens of a micro-batch on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from anabatic.plan.pipeline_stages import count_passes_in_flight, list_stages
from anabatic.plan.shapes.attention_kinds import DeltaAttention, LatentAttention
from anabatic.plan.tower_cost import estimate_tower_memory
from anabatic.plan.training_setup import QUANTIZED_BYTES, TrainingSetup

UPDATE_BUCKET_ELEMENTS = 1 << 24
"""Elements per bucket of AdamW's flat kernel (`train/optim/adamw.py`)."""
MIN_LOGIT_ROWS = 256
"""Minimum rows of logits per chunk (`models/forward.py`)."""
_MASK_BYTES = 2048 * 2048
"""Compressed causal mask of the fused attention, a byte per entry (op-plugin, npu_fusion_attention, sparse mode 3)."""
_BF16_BUCKET_BYTES = 24.0
"""Bytes per element of a bucket of bf16 weights: gradient, moments, weight, change and result in fp32."""


@dataclass(frozen=True)
class BlockActivations:
    """Bytes per token that a block saves for its backward pass, by kind."""

    stream: float
    """Inputs of the norms."""
    attention: float
    mlp: float
    adapters: float = 0.0

    @property
    def total(self) -> float:
        """Sum over the kinds."""
        return self.stream + self.attention + self.mlp + self.adapters


@dataclass
class PeakMemory:
    """Peak memory of a device, in bytes, by part, and its moment.

    Attributes:
        kinds: breakdown of the part "activations".
    """

    moment: str
    parts: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Sum of the parts, in bytes."""
        return sum(self.parts.values())


def get_compute_width(setup: TrainingSetup) -> int:
    """Return the bytes of an element in matrix products."""
    return 2 if setup.half else 4


def has_joint_products(setup: TrainingSetup) -> bool:
    """Return whether blocks cast their trained weights together and keep no copy (`models/weight_casts.py`)."""
    plain = setup.half and setup.weights == "fp32" and setup.tuner != "lora"
    whole = not setup.is_sharded and setup.tensor == 1 and setup.recompute == "none"
    return setup.casts_blocks and plain and whole


def get_stream_width(setup: TrainingSetup) -> int:
    """Return the bytes of an element of the residual stream: those of the embedding in the forward pass."""
    if not setup.half:
        return 4
    narrow = setup.is_sharded or setup.tuner == "lora" or setup.weights != "fp32"
    return 2 if narrow or setup.tuner == "freeze" else 4


def estimate_activations(setup: TrainingSetup, has_gradient: bool = True) -> BlockActivations:
    """Return the bytes per token that one block saves, of several kinds the most, with fused operators on an NPU.

    Args:
        has_gradient: the block or one below it has a gradient; else nothing is saved.
    """
    if not has_gradient:
        return BlockActivations(0.0, 0.0, 0.0)
    if setup.shape.kinds:
        return max((estimate_activations(kind) for kind, _ in setup.count_kinds()), key=lambda act: act.total)
    s, width, stream_width = setup.shape, get_compute_width(setup), get_stream_width(setup)
    tensor_fraction = 1 / setup.tensor
    queries, keys = s.heads * s.head_dim * tensor_fraction, s.kv_heads * s.head_dim * tensor_fraction
    stream = s.norms * (stream_width * s.hidden + 4.0)
    normed = 2 * width * s.hidden  # read by queries, keys, values; by gate and up
    # The rotary operator saves its inputs. gpt-oss rotates by plain products with the cosines of half a head, which
    # save the cosines.
    rotated = 0.0 if s.has_sinks else queries + keys
    if s.head_norms:
        rotated *= 2
    statistics = 2 * 8 * 4 * s.heads * tensor_fraction + (
        4 * (s.heads + s.kv_heads) * tensor_fraction if s.head_norms else 0
    )
    attention = (
        width * (rotated + (queries + keys) + keys + queries) + statistics
    )  # rotated queries and keys, values, output
    if s.gates_output:
        attention += 3 * width * queries  # the gate beside the queries, its sigmoid, the gated output
    if (other := setup.attention) is not None:
        attention = other.count_saved_bytes(width, setup.seq_len) * tensor_fraction
    if setup.context > 1 and setup.context_method == "ulysses":
        attention += width * _count_exchanged_elements(setup)
    kept_inner = 2 if has_joint_products(setup) else 3  # gate, up and their product, which may be computed again
    mlp = width * kept_inner * s.inner * tensor_fraction if not s.experts else _expert_activations(setup)
    adapters = width * setup.rank * len(setup.adapted_linears) if setup.tuner == "lora" else 0.0
    return BlockActivations(stream + normed, attention, mlp, adapters)


def _count_exchanged_elements(setup: TrainingSetup) -> float:
    """Return the elements per token that Ulysses' exchange keeps besides what attention saves on one device: the output
    before and after it, and key heads that go to several ranks.

    Latent attention reads copies of its values, no view of the product that also holds keys without rotation. What the
    delta rule keeps, its copies of key heads too, is counted where it reads it.
    """
    s = setup.shape
    if isinstance(s.attention, DeltaAttention):
        return 0.0
    if isinstance(s.attention, LatentAttention):
        return float(s.heads * (s.attention.value_dim - s.attention.nope_dim))
    repeated_heads = setup.repeated_key_heads - s.kv_heads / setup.tensor
    return s.head_dim * (s.heads / setup.tensor + 2 * repeated_heads)


def _expert_activations(setup: TrainingSetup) -> float:
    """Return the bytes of expert inputs and outputs, gate, up and their product; the shared expert counts as an MLP."""
    s, w = setup.shape, get_compute_width(setup)
    return (
        w * (s.experts_per_token * (2 * s.hidden + 3 * s.expert_inner) + 3 * s.shared_inner)
        + (12.0 + (16.0 if setup.expert > 1 else 0.0)) * s.experts_per_token  # places of rows, here and elsewhere
    )


def _kept_bytes(setup: TrainingSetup, act: BlockActivations) -> float:
    """Return the bytes per token that a block keeps until its backward pass, with recomputation."""
    s, w = setup.shape, get_compute_width(setup)
    if setup.recompute == "full":
        return float(get_stream_width(setup) * s.hidden)
    if setup.recompute == "selective":  # the block's input; products; attention's output and statistics
        if s.kinds:
            return max(_kept_bytes(kind, act) for kind, _ in setup.count_kinds())
        outputs = sum(setup.get_local_shape(layer)[1] for layer in s.linears) * w
        attention = (w * s.heads * s.head_dim + 64 * s.heads) / setup.tensor
        return float(get_stream_width(setup) * s.hidden + outputs + attention)
    return act.total


def _activation_bytes(setup: TrainingSetup, blocks: int, is_recomputed: bool) -> dict[str, float]:
    """Return the bytes that `blocks` blocks keep, by kind: the first ones if blocks below have no gradient, else all.

    Args:
        is_recomputed: one of them is in its backward pass, and recomputed if recomputation is on.
    """
    t, kinds = setup.local_tokens, dict.fromkeys(("norms", "attention", "MLP", "adapters"), 0.0)
    groups = setup.count_kinds(blocks, from_end=blocks > 1)
    if setup.recompute == "none":
        for group, count in groups:
            act = estimate_activations(group)
            sizes = {"norms": act.stream, "attention": act.attention, "MLP": act.mlp, "adapters": act.adapters}
            for name, size in sizes.items():
                kinds[name] += size * t * count
        return kinds
    acts = [(estimate_activations(group), group, count) for group, count in groups]
    kept = {"kept of each block": sum(_kept_bytes(group, act) * t * count for act, group, count in acts)}
    again = max(act.total * t - _kept_bytes(group, act) * t for act, group, _ in acts)
    return kept | ({"a block made again": again} if is_recomputed else {})


def estimate_peak_memory(setup: TrainingSetup) -> PeakMemory:
    """Return the peak on one device, of a pipeline on that of the stage that needs most."""
    moments = []
    for part in list_stages(setup) if setup.has_stages else [setup]:
        found = [*_estimate_backward(part), _estimate_embedding(part), _estimate_expert_sums(part)]
        found.append(_estimate_update(part))
        if part.stage in (None, part.pipeline - 1):
            found.append(_estimate_loss(part))
        found = _add_pictures(part, found)
        peak = max(found, key=lambda moment: moment.total)
        if part.stage is not None:
            peak.moment += f", stage {part.stage + 1} of {part.pipeline}"
        moments.append(peak)
    return max(moments, key=lambda moment: moment.total)


def _add_pictures(setup: TrainingSetup, moments: list[PeakMemory]) -> list[PeakMemory]:
    """Return moments of a step with what pictures keep in them, and those of the tower: its forward pass, before the
    decoder has saved anything, and where it is trained its backward pass, after the decoder's."""
    tower = estimate_tower_memory(setup, get_compute_width(setup), get_stream_width(setup))
    if tower is None:
        return moments
    for moment in moments:
        moment.parts["pixels"] = tower.pixels
        if moment.kinds or moment.moment == "the embedding's gradient":
            moment.kinds["tower"] = tower.saved
            moment.parts["activations"] = moment.parts.get("activations", 0.0) + tower.saved
    common = _local_persistent_bytes(setup) | {"pixels": tower.pixels, "gathered weights": _gathered_bytes(setup, 1)}
    kept = {"activations": tower.saved}
    forward = {"gradients": _gradient_total_bytes(setup, 0, head=False), "tower": tower.forward + tower.features}
    moments.append(PeakMemory("the tower's forward pass", common | kept | forward))
    if setup.trains_tower:
        blocks = setup.blocks_with_activations
        gradients = _gradient_total_bytes(setup, blocks, head=True, embedding=True)
        backward = {"gradients": gradients, "tower": tower.backward + tower.features}
        moments.append(PeakMemory("the tower's backward pass", common | kept | backward))
    return moments


def _in_flight_bytes(setup: TrainingSetup) -> float:
    """Return the bytes that a stage of a pipeline keeps of the micro-batches behind the one in its backward pass: what
    its blocks save, copies of its weights, the states that it has sent and their gradients. Blocks are counted once
    elsewhere; a pass through one of several chunks keeps only its part of them."""
    if setup.stage is None:
        return 0.0
    chunks = setup.pipeline_chunks
    waiting = count_passes_in_flight(setup.pipeline, chunks, setup.micro_steps, setup.stage) / chunks - 1
    kept = sum(_activation_bytes(setup, setup.blocks_with_activations, is_recomputed=False).values())
    states = (
        get_stream_width(setup)
        * setup.shape.hidden
        * setup.local_tokens
        * (setup.stage < setup.pipeline - 1 or chunks > 1)
    )
    return waiting * (kept + _cast_copy_bytes(setup, setup.shape.layers)) + (waiting * chunks + 2) * states


def get_persistent_bytes(setup: TrainingSetup) -> dict[str, float]:
    """Return the bytes allocated during the whole step, summed over the ranks that shard them; without gradients."""
    trained_bytes = 4.0 if setup.weights == "fp32" else 2.0
    moment = trained_bytes * (3 if setup.weights == "bf16_kahan" else 2)
    matrices = _count_muon_params(setup) if setup.muon else 0
    parts = {
        "trained weights": trained_bytes * setup.trained_params,
        "frozen weights": _frozen_bytes(setup),
        "optimizer": moment * (setup.trained_params - matrices) + 4.0 * matrices,
    }
    return parts | ({"reference": trained_bytes * setup.trained_params} if setup.has_reference else {})


def _local_persistent_bytes(setup: TrainingSetup) -> dict[str, float]:
    """Return the persistent bytes of one device, and the mask of the fused attention."""
    fraction = 0.0 if setup.offload else 1 / setup.shard_ranks if setup.is_sharded else 1.0
    return {name: size * fraction for name, size in get_persistent_bytes(setup).items()} | {
        "constants": 1.0 * _MASK_BYTES * setup.uses_attention_mask
    }


def _frozen_bytes(setup: TrainingSetup) -> float:
    width = get_compute_width(setup)
    if setup.quantize == "none":
        # of a whole model that is trained what is frozen of its tower has the precision of the trained weights
        wider = get_gradient_bytes(setup) - width if setup.tuner == "full" else 0.0
        return float(width * setup.frozen_params + wider * setup.frozen_tower_params)
    packed = sum(
        count * sum(layer.inputs * layer.outputs for layer in kind.linears) for kind, count in setup.shape.count_kinds()
    )
    packed //= setup.tensor
    return QUANTIZED_BYTES[setup.quantize] * packed + width * (setup.frozen_params - packed)


def _count_muon_params(setup: TrainingSetup) -> int:
    """Return the number of parameters that Muon updates."""
    if setup.tuner == "lora":
        return setup.trained_params
    return sum(
        count
        * (
            sum(layer.inputs * layer.outputs for layer in kind.linears) // setup.tensor
            + kind.expert_params
            - round((1 - setup.held_experts) * kind.stacked_params)
        )
        for kind, count in setup.shape.count_kinds(setup.trained_blocks)
    )


def get_gradient_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of an element of a gradient: the same as of its weight."""
    return 4.0 if setup.weights == "fp32" else 2.0


def has_gradient_buckets(setup: TrainingSetup) -> bool:
    """Return whether DDP's buckets hold all gradients; with tensor ranks and stages, gradients are averaged
    without the wrapper (`parallel/sharding.py`)."""
    return setup.strategy == "ddp" and setup.tensor == setup.pipeline == 1


def _cast_copy_bytes(setup: TrainingSetup, blocks: float) -> float:
    """Return the bytes of half-precision copies of trained fp32 weights of `blocks` blocks, saved for the backward
    pass."""
    if not setup.half or setup.weights != "fp32":
        return 0.0
    if setup.is_sharded:  # FSDP casts what it gathers
        return 2.0 * setup.count_divided_params(int(blocks)) * setup.has_plain_experts
    if setup.tuner == "lora":
        return 2.0 * _sum_blocks(setup, int(blocks), lambda kind: kind.adapter_block_params)
    trained = min(int(blocks), setup.trained_blocks)
    return 2.0 * _sum_blocks(
        setup, trained, lambda kind: kind.block_params - kind.shape.norm_params - _count_joint_params(kind)
    )


def _count_joint_params(setup: TrainingSetup) -> int:
    """Return the parameters of a block that it casts together: those of its linear layers, not of its experts."""
    return sum(layer.params for layer in setup.shape.linears) * has_joint_products(setup)


def _sum_blocks(setup: TrainingSetup, blocks: int, count_params: Callable[[TrainingSetup], int]) -> int:
    """Return the parameters that `count_params` counts in a block of a kind, of the last `blocks` blocks."""
    return sum(count * count_params(kind) for kind, count in setup.count_kinds(blocks))


def _gradient_total_bytes(setup: TrainingSetup, blocks: float, head: bool, embedding: bool = False) -> float:
    """Return the bytes of gradients that exist after the backward pass of the last `blocks` blocks."""
    holds_all = has_gradient_buckets(setup) or setup.micro_steps > 1
    s = setup.shape
    if setup.offload:
        return 0.0
    fraction = 1 / setup.shard_ranks if setup.is_sharded else 1.0
    if holds_all:
        # divided experts are in no bucket of DDP: their gradients come block by block
        pending = 0
        if setup.micro_steps == 1 and not setup.is_sharded:
            pending = setup.count_divided_params() - setup.count_divided_params(int(blocks))
        return get_gradient_bytes(setup) * (setup.trained_params - pending) * fraction
    num_params = 0.0
    if setup.tuner == "full":
        num_params = (
            _sum_blocks(setup, int(blocks), lambda kind: kind.block_params)
            + (s.embedding_params if head and setup.has_lm_head else 0)
            + (s.embedding_params if embedding and setup.has_embedding and not (s.is_tied and setup.has_lm_head) else 0)
        )
    elif setup.tuner == "lora":
        num_params = _sum_blocks(setup, int(blocks), lambda kind: kind.adapter_block_params)
    else:
        trained = min(int(blocks), setup.trained_blocks)
        num_params = _sum_blocks(setup, trained, lambda kind: kind.block_params)
    return get_gradient_bytes(setup) * num_params * fraction


def _gathered_bytes(setup: TrainingSetup, blocks: float) -> float:
    """Return the bytes of gathered weights in addition to the shard of a rank."""
    if not setup.is_sharded:
        return 0.0
    s, w = setup.shape, get_compute_width(setup)
    if setup.strategy == "zero2":
        return w * (setup.root_params + _sum_blocks(setup, s.layers, lambda kind: kind.gathered_block_params))
    return w * (setup.root_params + setup.gathered_block_params * min(blocks, s.layers))


def _estimate_loss(setup: TrainingSetup) -> PeakMemory:
    """Estimate the end of the forward pass: activations of all blocks, and the head."""
    s, w, t = setup.shape, get_compute_width(setup), setup.local_tokens
    target_tokens = t * setup.targets
    rows = min(target_tokens, max(MIN_LOGIT_ROWS, setup.chunk_bytes // (4 * s.vocab)))
    head_trained = setup.tuner == "full" and setup.has_lm_head
    norm_bytes = 1.0 * get_stream_width(setup) * s.hidden * t + 4 * t + w * s.hidden * t  # last norm
    if setup.targets < 1:
        norm_bytes += w * s.hidden * target_tokens
    head_gradient = 4.0 * s.embedding_params if head_trained else 0.0  # gradient of the head, always fp32
    head_copy = (
        2.0 * s.embedding_params
        if setup.half and head_trained and not setup.is_sharded and setup.weights == "fp32"
        else 0.0
    )
    logits = rows * s.vocab * 4.0 * setup.has_lm_head
    if setup.half:
        # First in fp32 and in the precision of their product; then their gradient, and the head's of this chunk before
        # it is accumulated in fp32. That is allocated between the two in the first chunk.
        first = rows * s.vocab * 6.0 * setup.has_lm_head
        second = rows * s.vocab * 2.0 * setup.has_lm_head + (w * s.embedding_params if head_trained else 0)
        is_single = rows >= target_tokens
        logits = max(first - (head_gradient if is_single else 0), second)
    kinds = _activation_bytes(setup, setup.blocks_with_activations, is_recomputed=False) | {
        "at the head": norm_bytes + w * s.hidden * target_tokens
    }
    parts = _local_persistent_bytes(setup) | {
        "gathered weights": _gathered_bytes(setup, 1),
        "gradients": _gradient_total_bytes(setup, 0, head=False) + head_gradient,
        "activations": sum(kinds.values()),
        "half-precision copies": _cast_copy_bytes(setup, s.layers) + head_copy,
        "logits": logits,
    }
    return PeakMemory("the loss", parts, kinds)


def _estimate_backward(setup: TrainingSetup) -> list[PeakMemory]:
    """Estimate the backward pass of the last and of the first block: between them the sum is monotonic."""
    moments = []
    for name, num_kept, num_done in (
        ("the last block's backward pass", setup.blocks_with_activations, 1),
        ("the first block's backward pass", 1, setup.blocks_with_activations),
    ):
        kinds = _activation_bytes(setup, num_kept, is_recomputed=True)
        parts = _local_persistent_bytes(setup) | {
            "gathered weights": _gathered_bytes(setup, 2),
            "gradients": _gradient_total_bytes(setup, num_done, head=setup.tuner == "full"),
            "activations": sum(kinds.values()),
            "half-precision copies": _cast_copy_bytes(setup, num_kept) + _recast_bytes(setup),
            "backward pass": _backward_workspace(setup),
            "micro-batches in flight": _in_flight_bytes(setup),
        }
        moments.append(PeakMemory(name, parts, kinds))
    return moments


def _backward_workspace(setup: TrainingSetup) -> float:
    """Return the bytes of gradients in the backward pass of an MLP: of its product, of gate and up, of the stream."""
    if setup.shape.kinds:
        return max(_backward_workspace(kind) for kind, _ in setup.count_kinds())
    s, w, t = setup.shape, get_compute_width(setup), setup.local_tokens
    inner = (s.experts_per_token * s.expert_inner + s.shared_inner if s.experts else s.inner) / setup.tensor
    recomputed = 2 * w * inner if has_joint_products(setup) and not s.experts else 0.0
    return t * (w * 2 * inner + recomputed + get_stream_width(setup) * s.hidden + w * s.hidden)


def _recast_bytes(setup: TrainingSetup) -> float:
    """Return the bytes of one block's weights that its backward pass casts again."""
    if setup.shape.kinds:
        return max(_recast_bytes(kind) for kind, _ in setup.count_kinds())
    return 2.0 * _count_joint_params(setup)


def _estimate_embedding(setup: TrainingSetup) -> PeakMemory:
    """Estimate the end of the backward pass: a dense gradient of the embedding, added to that of the head if tied, or
    of a pipeline's first stage to that of earlier micro-batches; both ends of a pipeline exchange that of a tied one.
    """
    s = setup.shape
    is_added = (s.is_tied and setup.has_lm_head) or setup.stage == 0
    parts = _local_persistent_bytes(setup) | {
        "gathered weights": _gathered_bytes(setup, 1),
        "gradients": _gradient_total_bytes(setup, setup.blocks_with_activations, head=True, embedding=True),
        "micro-batches in flight": _in_flight_bytes(setup) if setup.stage == 0 else 0.0,
        "backward pass": get_gradient_bytes(setup) * s.embedding_params * (setup.tuner == "full" and is_added),
    }
    return PeakMemory("the embedding's gradient", parts)


def _estimate_expert_sums(setup: TrainingSetup) -> PeakMemory:
    """Estimate the sums of gradients of divided experts over the ranks with the same ones, a flat copy for each bucket
    (`parallel/gradient_reduction.py`, reduce_expert_gradients)."""
    parts = _local_persistent_bytes(setup) | {
        "gradients": _gradient_total_bytes(setup, setup.blocks_with_activations, head=True, embedding=True)
    }
    if setup.has_plain_experts:
        elements = min(setup.count_divided_params(), UPDATE_BUCKET_ELEMENTS)
        parts |= {"sums of the experts' gradients": get_gradient_bytes(setup) * elements}
    return PeakMemory("the experts' gradients", parts)


def _muon_workspace(setup: TrainingSetup) -> float:
    """Return the workspace of Muon for the largest stack of equal matrices: the stack, the next iterate, its square
    and a polynomial of that (`train/optim/optimizer.py`), in half precision also a copy; several ranks divide the
    matrices of a stack.
    """
    if setup.tuner == "lora":
        return 0.0
    shapes = Counter[tuple[int, int]]()
    for kind, count in setup.count_kinds(setup.trained_blocks):
        for layer in kind.shape.linears:
            shapes[setup.get_local_shape(layer)] += count
    sizes = []
    for (rows, columns), matrices in shapes.items():
        own_matrices = matrices if setup.world_size == 1 else -(-matrices // setup.world_size)
        copies = (2 + setup.half) * own_matrices + (3 * matrices if setup.world_size > 1 else 0)
        sizes.append(get_compute_width(setup) * (copies * rows * columns + 2 * own_matrices * min(rows, columns) ** 2))
    return float(max(sizes, default=0))


def _estimate_update(setup: TrainingSetup) -> PeakMemory:
    """Estimate the update: AdamW's flat kernel copies the gradient of a bucket, then its weights if they decay; the
    second copy adds to the peak where the gradients stay, else it has the memory that they leave."""
    gradients = get_gradient_bytes(setup) * setup.trained_params * (1 / setup.shard_ranks if setup.is_sharded else 1.0)
    workspace = 0.0
    if not setup.fused_adamw and not setup.offload:
        elements = min(setup.trained_params / (setup.shard_ranks if setup.is_sharded else 1), UPDATE_BUCKET_ELEMENTS)
        # in DDP's buckets, or in the flat outputs of FSDP's reduce-scatter
        gradients_stay = setup.is_sharded or has_gradient_buckets(setup)
        copies = 2 if gradients_stay and setup.weight_decay else 1
        workspace = elements * (4.0 * copies if setup.weights == "fp32" else _BF16_BUCKET_BYTES)
    if setup.muon and not setup.offload:
        workspace = max(workspace, _muon_workspace(setup))
    parts = _local_persistent_bytes(setup) | {"gradients": 0.0 if setup.offload else gradients, "update": workspace}
    return PeakMemory("the update", parts)
