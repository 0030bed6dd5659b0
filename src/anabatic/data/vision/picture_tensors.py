"""Pictures of a micro-batch as tensors on the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Grid = tuple[int, int]
"""Rows and columns of patches; of a picture in tiles their number, and 1."""
PictureGrid = tuple[str, int, int]
"""A picture, and the rows and columns of its patches."""


@dataclass(frozen=True)
class PictureBatch:
    """Pictures of a micro-batch of `T` tokens, in the order of their tokens.

    Attributes:
        pixels: float32 `[patches, values of a patch]`; a tile is one patch.
        grids: rows and columns of patches of each picture.
        positions: int64 `[3, T]`: time, height and width, from 0 in every segment; of pictures in tiles `[1, T]`.
    """

    pixels: Tensor
    grids: list[Grid]
    positions: Tensor
