"""Bytes on a device through one optimizer step, part by part and moment by moment.

What is kept for the backward pass is listed tensor by tensor, as our own operators keep it (`estimate_activations`);
nothing is fitted. The peak is the largest of four moments: the loss, the backward pass of each block, the gradient of
the embedding, the update. Checked against the allocator's peak on simulated NPUs by `benchmarks/plan.py`.

Letters as in `decoder_shape.py`; `T` tokens of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from anabatic.plan.training_setup import QUANTIZED_BYTES, TrainingSetup

UPDATE_BUCKET_ELEMENTS = 1 << 24
"""Elements that AdamW's flat kernel updates at once (`train/optim/adamw.py`)."""
MIN_LOGIT_ROWS = 256
"""Rows of logits made at once at least (`models/forward.py`)."""
_MASK_BYTES = 2048 * 2048
"""The fused attention's compressed causal mask, one byte each (op-plugin, npu_fusion_attention, sparse mode 3)."""


_BF16_BUCKET_BYTES = 24.0
"""Bytes an element of a bucket of bf16 weights needs: gradient, moments, weight, change and result in fp32."""


@dataclass(frozen=True)
class BlockActivations:
    """Bytes a token that a block keeps for its backward pass, by kind."""

    stream: float
    """Inputs of the norms."""
    attention: float
    mlp: float
    adapters: float = 0.0

    @property
    def total(self) -> float:
        """Of a block."""
        return self.stream + self.attention + self.mlp + self.adapters


@dataclass
class PeakMemory:
    """The peak on a device, in bytes, by part; and the moment at which it comes.

    Attributes:
        kinds: what the part "activations" is made of.
    """

    moment: str
    parts: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


def get_compute_width(setup: TrainingSetup) -> int:
    """Bytes of a number in matrix products."""
    return 2 if setup.half else 4


def get_stream_width(setup: TrainingSetup) -> int:
    """Bytes of a number between blocks: as wide as the embedding that a forward pass sees."""
    if not setup.half:
        return 4
    narrow = setup.is_sharded or setup.tuner == "lora" or setup.weights != "fp32"
    return 2 if narrow or setup.tuner == "freeze" else 4


def estimate_activations(setup: TrainingSetup, trained: bool = True) -> BlockActivations:
    """Bytes a token that one block keeps, with fused operators on an NPU.

    Args:
        trained: something in it or below it has a gradient; else nothing is kept.
    """
    if not trained:
        return BlockActivations(0.0, 0.0, 0.0)
    s, w, wide = setup.shape, get_compute_width(setup), get_stream_width(setup)
    part = 1 / setup.tensor
    queries, keys = s.heads * s.head_dim * part, s.kv_heads * s.head_dim * part
    stream = s.norms * (wide * s.hidden + 4.0)
    normed = 2 * w * s.hidden  # read by queries, keys, values; by gate and up
    before = queries + keys  # rotation keeps what it turns
    if s.head_norms:
        before *= 2
    statistics = 2 * 8 * 4 * s.heads * part + (4 * (s.heads + s.kv_heads) * part if s.head_norms else 0)
    attention = w * (before + (queries + keys) + keys + queries) + statistics  # turned, values, output
    mlp = w * 3 * s.inner * part if not s.experts else _expert_activations(setup)
    adapters = w * setup.rank * len(setup.adapted_linears) if setup.tuner == "lora" else 0.0
    return BlockActivations(stream + normed, attention, mlp, adapters)


def _expert_activations(setup: TrainingSetup) -> float:
    """Rows of every choice before and after, gate and up, their product; the shared expert as an MLP."""
    s, w = setup.shape, get_compute_width(setup)
    return (
        w * (s.experts_per_token * (2 * s.hidden + 3 * s.expert_inner) + 3 * s.shared_inner)
        + 12.0 * s.experts_per_token
    )


def _kept_bytes(setup: TrainingSetup, act: BlockActivations) -> float:
    """Bytes a token that a block keeps until its backward pass, with recomputation."""
    s, w = setup.shape, get_compute_width(setup)
    if setup.recompute == "full":
        return float(get_stream_width(setup) * s.hidden)
    if setup.recompute == "selective":  # the block's input; products; attention's output and statistics
        outputs = sum(setup.get_local_shape(layer)[1] for layer in s.linears) * w
        attention = (w * s.heads * s.head_dim + 64 * s.heads) / setup.tensor
        return float(get_stream_width(setup) * s.hidden + outputs + attention)
    return act.total


def _activation_bytes(setup: TrainingSetup, blocks: int, again: bool) -> dict[str, float]:
    """Bytes that so many blocks keep, by kind.

    Args:
        again: one of them is in its backward pass, and has been made again where that is asked for.
    """
    t, act = setup.micro_tokens, estimate_activations(setup)
    if setup.recompute == "none":
        kinds = {"norms": act.stream, "attention": act.attention, "MLP": act.mlp, "adapters": act.adapters}
        return {name: size * t * blocks for name, size in kinds.items()}
    kept = _kept_bytes(setup, act) * t
    return {"kept of each block": kept * blocks} | ({"a block made again": act.total * t - kept} if again else {})


def estimate_peak_memory(setup: TrainingSetup) -> PeakMemory:
    """Return the peak on one device."""
    moments = [_estimate_loss(setup), *_estimate_backward(setup), _estimate_embedding(setup), _estimate_update(setup)]
    return max(moments, key=lambda moment: moment.total)


def get_persistent_bytes(setup: TrainingSetup) -> dict[str, float]:
    """Bytes that lie there all the time, over all ranks that divide them; gradients are moments' own matter."""
    trained_bytes = 4.0 if setup.weights == "fp32" else 2.0
    moment = trained_bytes * (3 if setup.weights == "bf16_kahan" else 2)
    matrices = _count_muon_params(setup) if setup.muon else 0
    found = {
        "trained weights": trained_bytes * setup.trained_params,
        "frozen weights": _frozen_bytes(setup),
        "optimizer": moment * (setup.trained_params - matrices) + 4.0 * matrices,
    }
    return found | ({"reference": trained_bytes * setup.trained_params} if setup.reference else {})


def _local_persistent_bytes(setup: TrainingSetup) -> dict[str, float]:
    """What of it is on a device, and the fused attention's mask."""
    share = 0.0 if setup.offload else 1 / setup.ranks if setup.is_sharded else 1.0
    return {name: size * share for name, size in get_persistent_bytes(setup).items()} | {
        "constants": 1.0 * _MASK_BYTES * setup.mask
    }


def _frozen_bytes(setup: TrainingSetup) -> float:
    plain = get_compute_width(setup)
    if setup.quantize == "none":
        return float(plain * setup.frozen_params)
    packed = setup.shape.layers * sum(layer.inputs * layer.outputs for layer in setup.shape.linears) // setup.tensor
    return QUANTIZED_BYTES[setup.quantize] * packed + plain * (setup.frozen_params - packed)


def _count_muon_params(setup: TrainingSetup) -> int:
    """Parameters that Muon moves."""
    s = setup.shape
    if setup.tuner == "lora":
        return setup.trained_params
    linears = sum(layer.inputs * layer.outputs for layer in s.linears) // setup.tensor
    return setup.trained_blocks * (linears + s.expert_params)


def get_gradient_bytes(setup: TrainingSetup) -> float:
    """Bytes of a number of a gradient: as its weight."""
    return 4.0 if setup.weights == "fp32" else 2.0


def _cast_copy_bytes(setup: TrainingSetup, blocks: float) -> float:
    """Half-precision copies of trained fp32 weights, which their products keep for the backward pass."""
    if not setup.half or setup.is_sharded or setup.weights != "fp32":
        return 0.0
    if setup.tuner == "lora":
        return 2.0 * setup.adapter_block_params * blocks
    return 2.0 * min(blocks, setup.trained_blocks) * (setup.block_params - setup.shape.norm_params)


def _gradient_total_bytes(setup: TrainingSetup, blocks: float, head: bool, embedding: bool = False) -> float:
    """Gradients that exist when those of the last `blocks` blocks have been made."""
    whole = setup.strategy == "ddp" or setup.micro_steps > 1
    s = setup.shape
    if setup.offload:
        return 0.0
    share = 1 / setup.ranks if setup.is_sharded else 1.0
    if whole:
        return get_gradient_bytes(setup) * setup.trained_params * share
    found = 0.0
    if setup.tuner == "full":
        found = (
            blocks * setup.block_params
            + (s.embedding_params if head and setup.words else 0)
            + (s.embedding_params if embedding and not (s.is_tied and setup.words) else 0)
        )
    elif setup.tuner == "lora":
        found = blocks * setup.adapter_block_params
    else:
        found = min(blocks, setup.trained_blocks) * setup.block_params
    return get_gradient_bytes(setup) * found * share


def _gathered_bytes(setup: TrainingSetup, blocks: float) -> float:
    """Whole weights that lie beside a rank's part."""
    if not setup.is_sharded:
        return 0.0
    s, w = setup.shape, get_compute_width(setup)
    block = w * (setup.block_params + (setup.adapter_block_params if setup.tuner == "lora" else 0))
    return w * s.outside_params + (block * (s.layers if setup.strategy == "zero2" else min(blocks, s.layers)))


def _estimate_loss(setup: TrainingSetup) -> PeakMemory:
    """The end of the forward pass: every block's activations, and the head."""
    s, w, t = setup.shape, get_compute_width(setup), setup.micro_tokens
    learned = t * setup.targets
    rows = min(learned, max(MIN_LOGIT_ROWS, setup.chunk_bytes // (4 * s.vocab)))
    head_trained = setup.tuner == "full" and setup.words
    ends = 1.0 * get_stream_width(setup) * s.hidden * t + 4 * t + w * s.hidden * t  # last norm
    if setup.targets < 1:
        ends += w * s.hidden * learned
    made = 4.0 * s.embedding_params if head_trained else 0.0  # the head's gradient, fp32 whatever the weights are
    copy = (
        2.0 * s.embedding_params
        if setup.half and head_trained and not setup.is_sharded and setup.weights == "fp32"
        else 0.0
    )
    logits = rows * s.vocab * (4 + (2 if setup.half else 0)) * setup.words  # in fp32, and as their product takes them
    if head_trained and setup.half:  # a chunk's share of the head's gradient, before it is added in fp32
        logits += w * s.embedding_params
    kinds = _activation_bytes(setup, setup.blocks_with_activations, again=False) | {
        "at the head": ends + w * s.hidden * learned
    }
    parts = _local_persistent_bytes(setup) | {
        "gathered weights": _gathered_bytes(setup, 1),
        "gradients": _gradient_total_bytes(setup, 0, head=False) + made,
        "activations": sum(kinds.values()),
        "half-precision copies": _cast_copy_bytes(setup, s.layers) + copy,
        "logits": logits,
    }
    return PeakMemory("the loss", parts, kinds)


def _estimate_backward(setup: TrainingSetup) -> list[PeakMemory]:
    """The backward pass of the last and of the first block: between them the sum falls or rises steadily."""
    found = []
    for name, below, done in (
        ("the last block's backward pass", setup.blocks_with_activations, 1),
        ("the first block's backward pass", 1, setup.blocks_with_activations),
    ):
        kinds = _activation_bytes(setup, below, again=True)
        parts = _local_persistent_bytes(setup) | {
            "gathered weights": _gathered_bytes(setup, 2),
            "gradients": _gradient_total_bytes(setup, done, head=setup.tuner == "full"),
            "activations": sum(kinds.values()),
            "half-precision copies": _cast_copy_bytes(setup, below),
            "backward pass": _backward_workspace(setup),
        }
        found.append(PeakMemory(name, parts, kinds))
    return found


def _backward_workspace(setup: TrainingSetup) -> float:
    """What the backward pass of an MLP has in hand: gradients of its product, of gate and up, and of the stream."""
    s, w, t = setup.shape, get_compute_width(setup), setup.micro_tokens
    inner = (s.inner or s.experts_per_token * s.expert_inner) / setup.tensor
    return t * (w * 2 * inner + get_stream_width(setup) * s.hidden + w * s.hidden)


def _estimate_embedding(setup: TrainingSetup) -> PeakMemory:
    """The end of the backward pass: a dense gradient of the embedding, added to the head's where they are one."""
    s = setup.shape
    more = (
        get_gradient_bytes(setup) * s.embedding_params if setup.tuner == "full" and s.is_tied and setup.words else 0.0
    )
    parts = _local_persistent_bytes(setup) | {
        "gathered weights": _gathered_bytes(setup, 1),
        "gradients": _gradient_total_bytes(setup, setup.blocks_with_activations, head=True, embedding=True),
        "backward pass": more,
    }
    return PeakMemory("the embedding's gradient", parts)


def _muon_workspace(setup: TrainingSetup) -> float:
    """What Muon holds beside the largest stack of equal matrices: it, the next iterate, its square and a polynomial of
    that (`train/optim/optimizer.py`), in half precision a copy too; of several ranks each works on its share of a whole
    one.
    """
    if setup.tuner == "lora":
        return 0.0
    shapes = Counter(setup.get_local_shape(layer) for layer in setup.shape.linears)
    sizes = []
    for (rows, columns), count in shapes.items():
        matrices = count * setup.trained_blocks
        share = matrices if setup.world_size == 1 else -(-matrices // setup.world_size)
        copies = (2 + setup.half) * share + (3 * matrices if setup.world_size > 1 else 0)
        sizes.append(get_compute_width(setup) * (copies * rows * columns + 2 * share * min(rows, columns) ** 2))
    return float(max(sizes, default=0))


def _estimate_update(setup: TrainingSetup) -> PeakMemory:
    """The flat kernel of AdamW copies a bucket's gradient, and makes as much again where the gradients stay."""
    gradients = get_gradient_bytes(setup) * setup.trained_params * (1 / setup.ranks if setup.is_sharded else 1.0)
    work = 0.0
    if not setup.fused_adamw and not setup.offload:
        own = min(setup.trained_params / (setup.ranks if setup.is_sharded else 1), UPDATE_BUCKET_ELEMENTS)
        stays = setup.strategy != "single"  # gradients lie in DDP's buckets, or in the flat results of FSDP's sums
        work = own * (4.0 * (2 if stays else 1) if setup.weights == "fp32" else _BF16_BUCKET_BYTES)
    if setup.muon and not setup.offload:
        work = max(work, _muon_workspace(setup))
    parts = _local_persistent_bytes(setup) | {"gradients": 0.0 if setup.offload else gradients, "update": work}
    return PeakMemory("the update", parts)
