"""Pictures of a micro-batch as tensors on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Grid = tuple[int, int]
"""Rows and columns of patches; of a picture in tiles their number, and 1."""


class PictureGrid(NamedTuple):
    """A picture or a video of a row, and its patches.

    Attributes:
        source: as `data.vision.row_pictures` names it.
        rows, columns: of patches; of a video, of each of its frames.
        times: temporal patches of a video.
        frames: of a video, which frames are shown, as many for each temporal patch.
        interval: positions in time between two temporal patches whose tokens follow each other; 0: text stands between.
    """

    source: str
    rows: int
    columns: int
    times: int = 1
    frames: Sequence[int] = ()
    interval: float = 0.0

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches."""
        return self.rows, self.columns

    @property
    def runs(self) -> list[int]:
        """Temporal patches of each run of its tokens."""
        return [self.times] if self.interval else [1] * self.times


@dataclass(frozen=True)
class PictureBatch:
    """Pictures of a micro-batch of `T` tokens, in the order of their tokens.

    Attributes:
        pixels: float32 `[patches, values of a patch]`; a tile is one patch.
        grids: rows and columns of patches of each picture, and of each temporal patch of a video.
        positions: int64 `[3, T]`: time, height and width, from 0 in every segment; of pictures in tiles `[1, T]`.
    """

    pixels: Tensor
    grids: list[Grid]
    positions: Tensor
