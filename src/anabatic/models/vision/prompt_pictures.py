"""Pictures of a prompt on its way through the engine: read in pieces, kept in the cache by what they show."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.data.vision.picture_tensors import PictureBatch
from anabatic.device.device import send_to_device
from anabatic.models.vision.packed_pictures import PictureFeatures
from anabatic.models.vision.tower_inputs import make_tower_inputs


class PromptPictures:
    """Pictures of one prompt; requests for several answers to it share them, and the tower runs once.

    Args:
        ids: int64 `[n]`, the prompt, in which each picture has its tokens.
        is_picture: bool `[n]`, which of them are pictures'.
        batch: the pictures, with positions of these tokens.

    Attributes:
        content_ids: `ids` with negative numbers for tokens of pictures, which say what they show: the cache of
            beginnings tells pictures from each other by them.
        axes: of positions: time, height and width, or one.
        length: tokens of the prompt.
        shift: what positions behind the prompt are ahead of the number of tokens.
    """

    def __init__(self, ids: np.ndarray, is_picture: np.ndarray, batch: PictureBatch) -> None:
        self._batch: PictureBatch | None = batch
        self._features: PictureFeatures | None = None
        self._positions = batch.positions.numpy()
        self._places = np.flatnonzero(is_picture)
        self.axes, self.length = len(self._positions), len(ids)
        self.shift = int(self._positions.max()) + 1 - len(ids)
        digest = hashlib.blake2b(batch.pixels.numpy().tobytes() + repr(batch.grids).encode(), digest_size=7).digest()
        content = ids.copy()
        content[self._places] = -1 - int.from_bytes(digest, "big") - np.arange(len(self._places))
        self.content_ids: list[int] = content.tolist()

    def make_positions(self, start: int, end: int) -> np.ndarray:
        """Return int64 `[axes, end - start]`: positions of tokens of the prompt and of what follows it."""
        behind = np.arange(max(start, self.length), max(end, self.length)) + self.shift
        return np.concatenate((self._positions[:, start:end], [behind] * self.axes), axis=1)

    def find_places(self, start: int, end: int) -> np.ndarray:
        """Return which of the tokens from `start` to `end` are pictures', counted from `start`."""
        first, last = np.searchsorted(self._places, (start, end))
        return self._places[first:last] - start

    def compute_features(self, model: PreTrainedModel, start: int, end: int) -> PictureFeatures:
        """Return the features of the tokens of pictures from `start` to `end`; the first time the tower runs."""
        if self._features is None:
            assert self._batch is not None
            packed = make_tower_inputs(model).pack_pictures(self._batch, model.device)
            self._features, self._batch = packed.compute_features(model), None
        first, last = np.searchsorted(self._places, (start, end))
        return self._features.slice(int(first), int(last))


PlacedPictures = tuple[int, PromptPictures, int, int]
"""Where a row begins in a step, its pictures, and the first and the last but one of its tokens."""


def gather_features(
    model: PreTrainedModel, rows: Sequence[PlacedPictures], device: torch.device
) -> tuple[PictureFeatures, Tensor] | None:
    """Return the features of all pictures in a step and their places, int64 `[n]` on the device; None: it has none."""
    places, found = [], []
    for offset, pictures, start, end in rows:
        here = pictures.find_places(start, end)
        if len(here):
            places.append(here + offset)
            found.append(pictures.compute_features(model, start, end))
    if not found:
        return None
    deep = [torch.cat(layer) for layer in zip(*(one.deep for one in found), strict=True)]
    joint = PictureFeatures(torch.cat([one.states for one in found]), deep)
    return joint, send_to_device(torch.from_numpy(np.concatenate(places)), device)
