"""Moves batches with pictures to the device; what follows from the pictures' sizes is computed on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError
from anabatic.data.batching.packing import Batch
from anabatic.data.vision.picture_batch import PictureBatch
from anabatic.device.device import send_to_device
from anabatic.models.forward import PackedBatch, pack_batch
from anabatic.models.vision.model_parts import find_tower
from anabatic.models.vision.packed_pictures import PackedPictures
from anabatic.models.vision.tower_attention import TowerSegments
from anabatic.parallel.mesh import SINGLE_CONTEXT, ContextGroup


@dataclass(frozen=True)
class PicturePacking:
    """Moves batches of a model that sees to the device; a `pack_batch`.

    Attributes:
        tower: its tower, whose sizes decide what it is given.
        image_token: id of the token that pictures are made of.
        merge: patches on a side of a token.
        is_trained: a part of the tower is: each micro-batch runs it, so that ranks agree on what has a gradient.
    """

    tower: Any
    image_token: int
    merge: int
    is_trained: bool

    def __call__(
        self, batch: Batch, device: torch.device, causal: bool = True, context: ContextGroup = SINGLE_CONTEXT
    ) -> PackedBatch:
        """Return the batch on the device; arguments as of `pack_batch`."""
        packed = pack_batch(batch, device, causal, context)
        if batch.pictures is None:
            return replace(packed, pictures=self._make_blank(device)) if self.is_trained else packed
        positions = torch.cat((batch.position_ids[None], batch.pictures.positions))[:, None]
        return replace(
            packed,
            position_ids=send_to_device(positions, device),
            pictures=replace(
                self.pack_pictures(batch.pictures, device),
                places=send_to_device((batch.input_ids == self.image_token).nonzero()[:, 0], device),
            ),
        )

    def _make_blank(self, device: torch.device) -> PackedPictures:
        config = self.tower.config
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        pixels = torch.zeros(self.merge**2, values)
        blank = PictureBatch(pixels, [(self.merge, self.merge)], torch.empty(3, 0, dtype=torch.int64))
        return self.pack_pictures(blank, device)

    def pack_pictures(self, pictures: PictureBatch, device: torch.device) -> PackedPictures:
        """Return pictures on the device, without the places of their tokens."""
        grids = torch.tensor([(1, rows, columns) for rows, columns in pictures.grids])
        return PackedPictures(
            send_to_device(pictures.pixels, device), grids, self._prepare_inputs(grids, pictures.grids, device), None
        )

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


def make_picture_packing(model: PreTrainedModel) -> PicturePacking:
    """Return what moves batches of a model to its device."""
    _, tower = find_tower(model)
    is_trained = any(parameter.requires_grad for parameter in tower.parameters())
    return PicturePacking(tower, model.config.image_token_id, int(tower.config.spatial_merge_size), is_trained)
