"""Parameters of the tower of a model that sees, from its `vision_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabatic.plan.shapes.config_values import ConfigValues


def count_tower_params(config: Mapping[str, Any], name: str = "vision_config") -> int:
    """Return the parameters of a tower with its projector, as transformers builds it for Qwen3-VL, Qwen2.5-VL, whose
    blocks have gates, or for GLM-V, whose positions are those of a picture of `image_size` (models/qwen3_vl,
    models/qwen2_5_vl and models/glm4v, modeling files).

    Raises:
        DataError: a size is missing or no number.
    """
    values = ConfigValues(config, name)
    width, inner = values.require_size("hidden_size"), values.require_size("intermediate_size")
    if "image_size" in config and "num_position_embeddings" not in config:
        return _count_glm_params(values, width, inner)
    merged = width * values.require_size("spatial_merge_size") ** 2
    out = values.read_size("out_hidden_size", default=width)
    has_gates = "fullatt_block_indexes" in config
    norm = width if has_gates else 2 * width
    attention = 4 * width * width + 4 * width
    mlp = 3 * width * inner + 2 * inner + width if has_gates else 2 * width * inner + inner + width
    patch = values.require_size("patch_size") ** 2 * values.require_size("temporal_patch_size")
    patches = width * patch * values.read_size("in_channels", "in_chans", default=3) + (0 if has_gates else width)
    projector = merged * merged + merged + merged * out + out
    deep = len(config.get("deepstack_visual_indexes") or ())
    return (
        values.require_size("depth") * (attention + mlp + 2 * norm)
        + patches
        + values.read_size("num_position_embeddings") * width
        + norm
        + projector
        + deep * (2 * merged + projector)
    )


def _count_glm_params(values: ConfigValues, width: int, inner: int) -> int:
    out, patch = values.require_size("out_hidden_size"), values.require_size("patch_size")
    kernel = values.read_size("in_channels", default=3) * values.require_size("temporal_patch_size") * patch**2
    block = 2 * width + 4 * width * width + 3 * width * out
    projector = out * width * values.require_size("spatial_merge_size") ** 2 + out
    projector += out * out + 2 * out + 3 * out * inner
    positions = (values.require_size("image_size") // patch) ** 2 * width
    return values.require_size("depth") * block + positions + width * kernel + width + 2 * width + projector
