"""Sizes of the tower of a model that sees that its memory and time depend on, from its `vision_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anabatic.plan.shapes.config_values import ConfigValues

_HEADS = 16
"""Of these towers, where a config.json leaves them out."""


@dataclass(frozen=True)
class TowerShape:
    """A tower of equal blocks, and the projector behind it.

    Attributes:
        gated: MLPs have a gate (Qwen2.5-VL, GLM-V).
        patches_per_token: patches that the projector joins; of tiles with the one that stands for all of the tile.
        values_per_token: numbers of a picture that become a token.
        out: width of the decoder; merged: of the patches that are joined.
        features: outputs of the projector for each token: 1, and those that are added behind layers of the decoder.
        window: patches of a window; 0: all blocks attend to the whole picture. full_blocks: those that do.
        tile_tokens: tokens of a tile, whose patches attend to each other alone; 0: a picture is one segment.
    """

    depth: int
    width: int
    inner: int
    heads: int
    gated: bool
    patches_per_token: float
    values_per_token: int
    out: int
    merged: int
    features: int = 1
    window: int = 0
    full_blocks: int = 0
    tile_tokens: int = 0

    @cached_property
    def matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of a block."""
        up = (self.width, self.inner)
        mlp = [up, up] if self.gated else [up]
        return [(self.width, 3 * self.width), (self.width, self.width), *mlp, (self.inner, self.width)]

    @cached_property
    def projector_matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers that make features of a token."""
        if self.tile_tokens:
            return [(self.merged, self.out), (self.out, self.out)]
        return [(self.merged, self.merged), (self.merged, self.out)] * self.features

    @cached_property
    def projector_params(self) -> int:
        """Parameters of the projector's matrices."""
        return sum(inputs * outputs for inputs, outputs in self.projector_matrices)

    def count_attended(self, picture_tokens: int) -> float:
        """Return the patches that a patch attends to, on average over the blocks."""
        whole = self.patches_per_token * (self.tile_tokens or picture_tokens)
        if not self.window:
            return whole
        return (self.full_blocks * whole + (self.depth - self.full_blocks) * min(self.window, whole)) / self.depth


@dataclass(frozen=True)
class PictureLoad:
    """Pictures of a training.

    Attributes:
        tokens: of a picture, on average.
        share: of all tokens that are pictures'; most: of those of a micro-batch, at most.
        source: where that is known from.
    """

    tokens: int
    share: float
    most: float
    source: str


def read_tower_shape(model: Mapping[str, Any], name: str = "vision_config") -> TowerShape | None:
    """Return the sizes of a model's tower, as transformers builds it for Qwen3-VL, Qwen3.5, Qwen2.5-VL, GLM-V and
    InternVL; None: the tower is of another kind.

    Raises:
        DataError: a size is missing or no number.
    """
    config = model["vision_config"]
    values, text = ConfigValues(config, name), ConfigValues(model["text_config"], "text_config")
    width, inner = values.require_size("hidden_size"), values.require_size("intermediate_size")
    heads = values.read_size("num_heads", "num_attention_heads", default=_HEADS)
    depth = values.read_size("depth", "num_hidden_layers")
    out = values.read_size("out_hidden_size", default=text.require_size("hidden_size"))
    if not depth:
        return None
    if "downsample_ratio" in model:
        side, ratio = values.require_side("image_size"), float(model["downsample_ratio"])
        rows = side // values.require_side("patch_size")
        tokens = max(1, int(rows * ratio)) ** 2
        sizes = ((rows**2 + 1) / tokens, 3 * side**2 // tokens, out, int(width / ratio**2))
        return TowerShape(depth, width, inner, heads, False, *sizes, tile_tokens=tokens)
    if "spatial_merge_size" not in config:
        return None
    merge, patch = values.require_size("spatial_merge_size") ** 2, values.require_size("patch_size")
    numbers = 3 * values.require_size("temporal_patch_size") * patch**2 * merge
    is_glm = "image_size" in config and "num_position_embeddings" not in config
    full = config.get("fullatt_block_indexes")
    window = (values.read_size("window_size") // patch) ** 2 if full else 0
    return TowerShape(
        depth, width, out if is_glm else inner, heads, is_glm or full is not None, merge, numbers, out,
        out if is_glm else width * merge, 1 + len(config.get("deepstack_visual_indexes") or ()), window,
        len(full or ()),
    )  # fmt: skip
