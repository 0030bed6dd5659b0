"""Pictures of a packed batch on the device, and their features: the tower runs over all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.models.vision.model_parts import find_tower


@dataclass(frozen=True)
class PackedPictures:
    """Pictures of a batch; what follows from their sizes is computed on the host.

    Attributes:
        pixels: `[patches, values of a patch]`, on the device.
        grids: int64 `[pictures, 3]`, on the host: 1, rows and columns of patches.
        inputs: what the tower is given beside the patches, on the device.
        is_blank: one blank picture without tokens, which gives every trained weight of the tower a gradient of zero.
    """

    pixels: Tensor
    grids: Tensor
    inputs: dict[str, Any]
    is_blank: bool = False

    def compute_inputs(self, model: PreTrainedModel, input_ids: Tensor) -> dict[str, Any]:
        """Return arguments of the model's body: the features of all pictures, those of its first layers included."""
        body: Any = model.base_model
        _, tower = find_tower(model)
        is_trained = any(parameter.requires_grad for parameter in tower.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
            features = body.get_image_features(self.pixels, image_grid_thw=self.grids, return_dict=True, **self.inputs)
        if not self.is_blank:
            return {"mm_encoder_outputs": {"image": features}}
        deep = [one for layer in getattr(features, "deepstack_features", None) or () for one in layer]
        nothing = sum(one.sum() for one in (*features.pooler_output, *deep)) * 0.0
        embedded = model.get_input_embeddings()(input_ids)
        return {"input_ids": None, "inputs_embeds": embedded + nothing.to(embedded.dtype)}
