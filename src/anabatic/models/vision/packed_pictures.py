"""Pictures of a packed batch on the device, and their features: the tower runs over all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.models.vision.model_parts import is_sight_trained


@dataclass(frozen=True)
class PictureFeatures:
    """What a tower makes of pictures, for their `n` tokens in order.

    Attributes:
        states: `[n, H]`, in place of the tokens' embeddings.
        deep: `[n, H]` each, added behind the first layers of the decoder (DeepStack, arXiv 2406.04334).
    """

    states: Tensor
    deep: Sequence[Tensor]

    def slice(self, start: int, end: int) -> PictureFeatures:
        """Return the features of some of the tokens."""
        return PictureFeatures(self.states[start:end], [one[start:end] for one in self.deep])


@dataclass(frozen=True)
class PackedPictures:
    """Pictures of a batch; what follows from their sizes is computed on the host.

    Attributes:
        pixels: `[patches, values of a patch]` or `[tiles, 3, side, side]`, on the device.
        inputs: what the tower is given beside the patches, on the device.
        places: int64 `[n]`, on the device: which tokens of the batch are the pictures'. None: the picture is a blank
            one without tokens, which gives every trained weight of the tower a gradient of zero.
    """

    pixels: Tensor
    inputs: dict[str, Any]
    places: Tensor | None

    def compute_features(self, model: PreTrainedModel) -> PictureFeatures:
        """Run tower and projector, with gradients where a part of them is trained."""
        body: Any = model.base_model
        with torch.set_grad_enabled(torch.is_grad_enabled() and is_sight_trained(model)):
            out = body.get_image_features(self.pixels, return_dict=True, **self.inputs)
        deep = getattr(out, "deepstack_features", None) or ()
        return PictureFeatures(torch.cat(tuple(out.pooler_output)), [torch.cat(tuple(one)) for one in deep])

    def compute_inputs(self, model: PreTrainedModel, input_ids: Tensor) -> dict[str, Any]:
        """Return arguments of the decoder in place of `input_ids`, `[1, T]`."""
        features = self.compute_features(model)
        if self.places is not None:
            return insert_features(model, input_ids, features, self.places)
        nothing = torch.stack([one.sum() for one in (features.states, *features.deep)]).sum() * 0.0
        embedded = model.get_input_embeddings()(input_ids)
        return {"inputs_embeds": embedded + nothing.to(embedded.dtype)}


def insert_features(
    model: PreTrainedModel, input_ids: Tensor, features: PictureFeatures, places: Tensor
) -> dict[str, Any]:
    """Return arguments of a model's decoder in place of `input_ids`, `[1, T]`, whose tokens `places` are pictures.

    transformers finds them by a mask on the device, and waits for it in every layer that adds features; these are given
    their places, which the host knows.
    """
    embedded = model.get_input_embeddings()(input_ids)
    embedded = embedded.index_copy(1, places, features.states.to(embedded.dtype)[None])
    if not features.deep:
        return {"inputs_embeds": embedded}
    decoder: Any = model.get_decoder()
    decoder._deepstack_process = _add_features
    return {"inputs_embeds": embedded, "visual_pos_masks": places, "deepstack_visual_embeds": features.deep}


def _add_features(states: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Add features to states `[1, T, H]`; in place of a method of transformers' decoder."""
    return states.index_add(1, places, features.to(states.dtype)[None])
