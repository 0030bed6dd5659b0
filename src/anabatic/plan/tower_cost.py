"""Memory and time of the tower of a model that sees, for the pictures of a micro-batch.

A frozen tower saves nothing: its pictures are held, and its forward pass needs a workspace before the decoder has saved
anything. What trained blocks save is listed tensor by tensor, as transformers' modules save it in autograd
(models/qwen3_vl/modeling_qwen3_vl.py). `benchmarks/plan.py` compares it with peaks of allocators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anabatic.plan.shapes.tower_sizes import TowerShape
from anabatic.plan.training_setup import TrainingSetup

_ROTARY_FLOATS = 6.0
"""Numbers in fp32 for each of a patch's width while keys are rotated: the rotated queries, and the keys, both products
and their operands."""
_POSITION_FLOATS = 4.0
"""Rows of the table of positions for a patch: the four that are mixed."""
_SMALL_OPERATORS = 27
"""Operators of a block beside its products and attention, most of them copies, casts and products of the rotation.
Measured on the simulated NPU (`benchmarks/npu_budget.py`, "lora, pictures")."""


@dataclass(frozen=True)
class TowerMemory:
    """Bytes of a micro-batch on one device.

    Attributes:
        pixels: held during the whole pass; features: what the decoder is given.
        saved: for the backward pass of tower and projector, with copies of trained weights in half precision.
        forward, backward: workspaces.
    """

    pixels: float
    features: float
    saved: float
    forward: float
    backward: float


def estimate_tower_memory(setup: TrainingSetup, width: int, stream_width: int) -> TowerMemory | None:
    """Return the memory of the pictures of a micro-batch that has most of them; None for text alone.

    Args:
        width: bytes of a number in products; stream_width: between blocks.
    """
    tower, load = setup.shape.tower, setup.pictures
    if tower is None or load is None:
        return None
    tokens = setup.local_tokens * load.most
    patches, wide = tokens * tower.patches_per_token, tower.width
    pixels = 4.0 * tokens * tower.values_per_token
    rotated = 4.0 * _ROTARY_FLOATS * wide + width * 4.0 * wide
    widened = 4.0 * (2 * wide if width == 2 else 0)
    products = width * (3 if tower.gated else 2) * tower.inner
    block = stream_width * 2 * wide + max(rotated + widened, products + width * wide)
    positions = (width + 4.0) * _POSITION_FLOATS * wide + width * tower.values_per_token / tower.patches_per_token
    features = width * tokens * tower.out * tower.features
    saved = 0.0
    if setup.trains_tower:
        saved = patches * _count_saved_by_tower(tower, setup.recompute != "none", width, stream_width)
    if setup.trains_tower or setup.trains_projector:
        joined = (stream_width + 3.0 * width) * tower.merged
        saved += tokens * (joined * tower.features if not tower.tile_tokens else joined + 2 * width * tower.out)
        saved += _count_cast_bytes(setup, tower)
    return TowerMemory(pixels, features, saved, patches * max(block, positions), patches * (block + products))


def _count_saved_by_tower(tower: TowerShape, is_recomputed: bool, width: int, stream_width: int) -> float:
    """Return the bytes of a patch that all blocks save, or with recomputation their inputs and one block's tensors."""
    wide = tower.width
    norms = 2.0 * (stream_width * wide + 8 + width * wide)
    attention = width * 6.0 * wide + 64 * tower.heads  # rotated queries and keys, the product they come from, output
    mlp = width * (3.0 if tower.gated else 2.0) * tower.inner
    block = norms + attention + mlp
    embedding = width * tower.values_per_token / tower.patches_per_token
    return embedding + (stream_width * wide * tower.depth + block if is_recomputed else block * tower.depth)


def _count_cast_bytes(setup: TrainingSetup, tower: TowerShape) -> float:
    """Return the bytes of copies of trained fp32 weights in half precision, which products save."""
    if not setup.half or setup.tuner != "full" or setup.weights != "fp32" or setup.is_sharded:
        return 0.0
    blocks = tower.depth * sum(inputs * outputs for inputs, outputs in tower.matrices)
    return 2.0 * (blocks * setup.trains_tower + tower.projector_params * setup.trains_projector)


TowerProduct = tuple[float, float, float]
"""Rows, inputs and outputs of a matrix product."""


@dataclass(frozen=True)
class TowerWork:
    """Work of a forward pass over the pictures of a micro-batch.

    Attributes:
        blocks, projector: matrix products.
        mixing: operations of attention in one block.
        vectors: numbers that other operators of one block read or write.
        operators: of one block beside its products.
    """

    depth: int
    blocks: list[TowerProduct]
    projector: list[TowerProduct]
    mixing: float
    vectors: float
    operators: int

    @property
    def flops(self) -> tuple[float, float]:
        """Operations of the tower and of the projector."""
        block, projector = (
            sum(2.0 * rows * inputs * outputs for rows, inputs, outputs in products)
            for products in (self.blocks, self.projector)
        )
        return self.depth * (block + self.mixing), projector


def count_tower_work(setup: TrainingSetup) -> TowerWork | None:
    """Return the work of an average micro-batch's pictures; None for text alone."""
    tower, load = setup.shape.tower, setup.pictures
    if tower is None or load is None:
        return None
    tokens = setup.local_tokens * load.share
    patches = tokens * tower.patches_per_token
    return TowerWork(
        tower.depth,
        [(patches, *sizes) for sizes in tower.matrices],
        [(tokens, *sizes) for sizes in tower.projector_matrices],
        4.0 * patches * tower.count_attended(load.tokens) * tower.width,  # queries by keys, scores by values
        patches * ((70.0 if setup.half else 40.0) * tower.width + 2.0 * tower.inner),
        _SMALL_OPERATORS,
    )


def iter_notes(setup: TrainingSetup) -> Iterator[str]:
    """Yield the line of a plan about the pictures, if there are any."""
    load = setup.pictures
    if load is not None:
        most = f", at most {load.most:.0%} of a micro-batch's" if load.most > load.share + 0.005 else ""
        yield f"pictures: {load.tokens:,} tokens each, {load.share:.0%} of all tokens{most} ({load.source})"
