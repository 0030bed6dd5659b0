"""Model sizes from one dial, `depth`: width, heads and inner size are derived, each with its reason."""

from __future__ import annotations

import math

from anabatic.config.pretrain import PretrainModel as ModelConfig
from anabatic.config.sections.common import DerivedSizes
from anabatic.core.errors import ConfigError

HEAD_LADDER = ((1024, 128), (128, 64), (0, 32))
"""(minimum width, head size): small models keep several heads."""


def derive_model_sizes(model: ModelConfig, vocab_size: int) -> DerivedSizes:
    """Derive the sizes of a model from its depth.

    Raises:
        ConfigError: the given sizes do not divide one another.
    """
    sizes = DerivedSizes()
    depth = model.resolved_depth
    sizes.add_value("depth", None, depth, "the dial")
    base_width = 64 * depth
    head_dim = next(size for width, size in HEAD_LADDER if (model.width or base_width) >= width)
    head_dim = min(head_dim, model.head_dim)
    width = math.ceil(base_width / head_dim) * head_dim
    sizes.add_value("width", model.width, width, f"64 x depth, a multiple of the head size {head_dim}")
    width = sizes.get_int("width")
    heads = model.heads or max(1, width // head_dim)
    sizes.add_value("heads", model.heads, heads, f"width / {head_dim}")
    if model.heads is None and width % head_dim:
        raise ConfigError(
            f"model.width {width} is not a multiple of the head size {head_dim}",
            f"set model.width to {math.ceil(width / head_dim) * head_dim}, or model.heads",
        )
    if model.heads is not None:
        head_dim = _divide_evenly("model.width", width, "model.heads", heads)
    sizes.add_value("head_dim", None, head_dim, "128 from width 1024, 64 from 128, else 32")
    sizes.add_value("kv_heads", model.kv_heads, heads, "as many as query heads")
    _divide_evenly("model.heads", heads, "model.kv_heads", sizes.get_int("kv_heads"))
    inner = math.ceil(width * 8 / 3 / 64) * 64
    sizes.add_value("intermediate", model.intermediate, inner, "8/3 x width, a multiple of 64 (arXiv 2002.05202)")
    block_params = depth * (width * head_dim * 2 * (heads + sizes.get_int("kv_heads")) + 3 * width * inner)
    embedding_fraction = 2 * vocab_size * width / (2 * vocab_size * width + block_params)
    tie_embeddings = bool(embedding_fraction > 1 / 3) if model.tie_embeddings is None else model.tie_embeddings
    sizes.values["tie_embeddings"] = tie_embeddings
    sizes.reasons["tie_embeddings"] = (
        f"embedding and head would be {embedding_fraction:.0%} of the weights"
        if model.tie_embeddings is None
        else "given"
    )
    return sizes


def _divide_evenly(name: str, value: int, divisor_name: str, divisor: int) -> int:
    if value % divisor:
        raise ConfigError(
            f"{name} {value} is not a multiple of {divisor_name} {divisor}", f"choose {divisor_name} among its divisors"
        )
    return value // divisor
