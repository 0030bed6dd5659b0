"""Moves batches with pictures to the device; what follows from the pictures' sizes is computed on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from anabatic.data.batching.packing import Batch
from anabatic.device.device import send_to_device
from anabatic.models.forward import PackedBatch, pack_batch
from anabatic.models.vision.model_parts import is_sight_trained
from anabatic.models.vision.tower_inputs import TowerInputs, make_tower_inputs
from anabatic.parallel.mesh import SINGLE_CONTEXT, ContextGroup


@dataclass(frozen=True)
class PicturePacking:
    """Moves batches of a model that sees to the device; a `pack_batch`.

    Attributes:
        inputs: move its pictures.
        feature_tokens: ids of the tokens that pictures and frames are made of, `[n]`.
        is_trained: a part of the tower or projector is: each micro-batch runs it, so that ranks agree on what has a
            gradient.
    """

    inputs: TowerInputs
    feature_tokens: torch.Tensor
    is_trained: bool

    def __call__(
        self, batch: Batch, device: torch.device, causal: bool = True, context: ContextGroup = SINGLE_CONTEXT
    ) -> PackedBatch:
        """Return the batch on the device; arguments as of `pack_batch`."""
        packed = pack_batch(batch, device, causal, context)
        if batch.pictures is None:
            return replace(packed, pictures=self.inputs.make_blank(device)) if self.is_trained else packed
        positions = batch.pictures.positions[:, None]
        if len(positions) > 1:
            positions = torch.cat((batch.position_ids[None, None], positions))
        return replace(
            packed,
            position_ids=send_to_device(positions.squeeze(0), device),
            pictures=replace(
                self.inputs.pack_pictures(batch.pictures, device),
                places=send_to_device(torch.isin(batch.input_ids, self.feature_tokens).nonzero()[:, 0], device),
            ),
        )


def make_picture_packing(model: PreTrainedModel) -> PicturePacking:
    """Return what moves batches of a model to its device."""
    inputs = make_tower_inputs(model)
    tokens = [model.config.image_token_id]
    if hasattr(model.config, "vision_start_token_id"):  # Qwen-VL's; frames of others have the token of pictures
        tokens.append(model.config.video_token_id)
    return PicturePacking(inputs, torch.tensor(tokens), is_sight_trained(model))
