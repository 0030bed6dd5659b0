"""What a tower reads beside the patches: computed from the pictures' sizes on the host, and sent to the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError
from anabatic.data.vision.picture_tensors import PictureBatch
from anabatic.device.device import send_to_device
from anabatic.models.vision.model_parts import find_tower
from anabatic.models.vision.packed_pictures import PackedPictures
from anabatic.models.vision.tower_attention import TowerSegments


@dataclass(frozen=True)
class TowerInputs:
    """Moves pictures of a model to its device.

    Attributes:
        tower: whose sizes decide what it is given.
        merge: patches on a side of a token; 1 where pictures are tiles.
        tile: side of a tile in pixels; None: pictures are grids of patches.
    """

    tower: Any
    merge: int
    tile: int | None = None

    def make_blank(self, device: torch.device) -> PackedPictures:
        """Return a blank picture of one token, which stands for nothing."""
        config = self.tower.config
        values = 3 * (self.tile or 0) ** 2 or config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.zeros(self.merge**2, values)
        blank = PictureBatch(pixels, [(self.merge, self.merge)], torch.empty(3, 0, dtype=torch.int64))
        return self.pack_pictures(blank, device)

    def pack_pictures(self, pictures: PictureBatch, device: torch.device) -> PackedPictures:
        """Return pictures on the device, without the places of their tokens."""
        if self.tile is not None:
            tiles = pictures.pixels.view(-1, 3, self.tile, self.tile)
            return PackedPictures(send_to_device(tiles, device), {}, None)
        grids = torch.tensor([(1, rows, columns) for rows, columns in pictures.grids])
        inputs = self._prepare_inputs(grids, pictures.grids, device)
        if hasattr(self.tower, "embeddings"):  # GLM-V reads its table of positions by the sizes, on the device
            grids = send_to_device(grids, device)
        return PackedPictures(send_to_device(pictures.pixels, device), {"image_grid_thw": grids, **inputs}, None)

    def _prepare_inputs(self, grids: Tensor, sizes: list[tuple[int, int]], device: torch.device) -> dict[str, Any]:
        """Return what a tower would otherwise compute from the grids on the device, with a wait for each value."""
        try:
            from transformers import vision_utils
        except ImportError as error:
            raise ConfigError(
                "models that see need transformers 5.23 or newer", "pip install -U transformers"
            ) from error
        lengths = [rows * columns for rows, columns in sizes]
        listed = [0, *accumulate(lengths)]
        borders = send_to_device(torch.tensor(listed, dtype=torch.int32), device)
        plans = [(borders, listed)]
        inputs: dict[str, Any] = {
            "image_cu_seqlens": borders,
            "image_max_seqlen": max(lengths),
            "image_position_ids": send_to_device(vision_utils.get_vision_position_ids(grids, self.merge), device),
        }
        side = getattr(self.tower, "num_grid_per_side", None)
        if side is not None:
            indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
                grids,
                num_grid_per_side=side,
                mode=self.tower.interpolation_mode,
                align_corners=self.tower.interpolation_align_corners,
                spatial_merge_size=self.merge,
            )
            inputs["image_interp_indices"] = send_to_device(indices, device)
            inputs["image_interp_weights"] = send_to_device(weights, device)
        window = getattr(self.tower.config, "window_size", None)
        if window:
            order, windows = vision_utils.get_vision_window_index(
                grids, self.merge, window, self.tower.config.patch_size
            )
            inputs["image_window_index"] = send_to_device(order, device)
            inputs["image_cu_window_seqlens"] = send_to_device(windows, device)
            inputs["image_max_window_seqlen"] = int(windows.diff().max())
            plans.append((inputs["image_cu_window_seqlens"], windows.tolist()))
        inputs["tower_segments"] = TowerSegments(plans, device)
        return inputs


def make_tower_inputs(model: PreTrainedModel) -> TowerInputs:
    """Return what moves pictures of a model to its device."""
    _, tower = find_tower(model)
    merge = getattr(tower.config, "spatial_merge_size", None)
    return TowerInputs(tower, 1, int(tower.config.image_size[0])) if merge is None else TowerInputs(tower, int(merge))
