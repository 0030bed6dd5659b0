"""Parameters of the tower of a model that sees, from its `vision_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabatic.plan.shapes.config_values import ConfigValues


def count_tower_params(model: Mapping[str, Any], name: str = "vision_config") -> int:
    """Return the parameters of a model's tower with its projector, as transformers builds it for Qwen3-VL, Qwen2.5-VL,
    whose blocks have gates, GLM-V, whose positions are those of a picture of `image_size`, or InternVL, whose patches
    are joined by `downsample_ratio` (models/qwen3_vl, models/qwen2_5_vl, models/glm4v, models/internvl).

    Raises:
        DataError: a size is missing or no number.
    """
    config = model["vision_config"]
    values = ConfigValues(config, name)
    width, inner = values.require_size("hidden_size"), values.require_size("intermediate_size")
    if "downsample_ratio" in model:
        out = ConfigValues(model["text_config"], "text_config").require_size("hidden_size")
        return _count_tile_params(values, config, int(width / float(model["downsample_ratio"]) ** 2), out)
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


def _count_tile_params(values: ConfigValues, config: Mapping[str, Any], merged: int, out: int) -> int:
    width, inner = values.require_size("hidden_size"), values.require_size("intermediate_size")
    patch = values.require_side("patch_size")
    patches = (values.require_side("image_size") // patch) ** 2 + 3 * patch**2
    vectors = 3 + bool(config.get("use_mask_token")) + (0 if config.get("use_mean_pooling", True) else 2)
    norms = 2 if config.get("norm_type") == "rms_norm" else 4
    small = norms + 4 + 3 * bool(config.get("attention_bias")) + 2 * bool(config.get("use_qk_norm"))
    block = 4 * width * width + 2 * width * inner + inner + small * width
    projector = 2 * merged + merged * out + out + out * out + out
    return values.require_size("num_hidden_layers") * block + (patches + vectors) * width + projector


def _count_glm_params(values: ConfigValues, width: int, inner: int) -> int:
    out, patch = values.require_size("out_hidden_size"), values.require_size("patch_size")
    kernel = values.read_size("in_channels", default=3) * values.require_size("temporal_patch_size") * patch**2
    block = 2 * width + 4 * width * width + 3 * width * out
    projector = out * width * values.require_size("spatial_merge_size") ** 2 + out
    projector += out * out + 2 * out + 3 * out * inner
    positions = (values.require_size("image_size") // patch) ** 2 * width
    return values.require_size("depth") * block + positions + width * kernel + width + 2 * width + projector
