"""Collates segments with pictures: patches as one sequence, and positions of tokens in three axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.data.batching.packing import Batch, TokenSegment, collate_packed
from anabatic.data.vision.patches import make_patches
from anabatic.data.vision.picture_files import load_picture, make_name
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.picture_tensors import Grid, PictureBatch, PictureGrid


@dataclass(frozen=True)
class CollatePictures:
    """Lays segments side by side as `collate_packed` does, with their pictures; a `CollateFn`."""

    rules: PictureRules

    def __call__(
        self,
        pieces: Sequence[TokenSegment],
        capacity: int,
        pad_id: int,
        seq_len: int,
        state: dict[str, Any] | None = None,
    ) -> Batch:
        """Return the batch; arguments as of `collate_packed`.

        Raises:
            DataError: a picture is not what it was when the rows were tokenised.
        """
        batch = collate_packed(pieces, capacity, pad_id, seq_len, state)
        if any(piece.pictures for piece in pieces):
            batch.pictures = self._read_pictures(pieces, batch)
        return batch

    def _read_pictures(self, pieces: Sequence[TokenSegment], batch: Batch) -> PictureBatch:
        positions = batch.position_ids.numpy()[None].repeat(3, axis=0)
        found: list[PictureBatch] = []
        for number, piece in enumerate(pieces):
            if not piece.pictures:
                continue
            sources = json_reader.loads(piece.pictures.decode("utf-8", "surrogateescape"))
            found.append(read_pictures(piece.ids[:-1], sources, self.rules))
            positions[:, batch.cu_seqlens[number] : batch.cu_seqlens[number + 1]] = found[-1].positions.numpy()
        pixels = torch.cat([one.pixels for one in found])
        return PictureBatch(pixels, [grid for one in found for grid in one.grids], torch.from_numpy(positions))


def read_pictures(ids: np.ndarray, pictures: Sequence[PictureGrid], rules: PictureRules) -> PictureBatch:
    """Return the pictures of a document whose tokens are `ids`.

    Raises:
        DataError: a picture is not what it was when it was measured, or has other tokens.
    """
    grids = [(rows, columns) for _, rows, columns in pictures]
    patches = [_read_patches(source, (rows, columns), rules) for source, rows, columns in pictures]
    positions = torch.from_numpy(make_positions(ids, grids, rules))
    return PictureBatch(torch.from_numpy(np.concatenate(patches)), grids, positions)


def _read_patches(source: str, grid: Grid, rules: PictureRules) -> np.ndarray:
    image = load_picture(source)
    if rules.fit_grid(image.size[1], image.size[0]) != grid:
        raise DataError(
            f"{make_name(source)}: the picture has another size than when the rows were tokenised",
            "put the old picture back, or give --data.cache a new folder",
        )
    return make_patches(image, rules, grid)


def make_positions(ids: np.ndarray, grids: Sequence[Grid], rules: PictureRules) -> np.ndarray:
    """Return the positions of a document's tokens in time, height and width, int64 `[3, n]`.

    Text counts on in all three; a picture is at one time, its tokens at their row and column, and what follows begins
    behind its longer side (transformers, models/qwen3_vl/modeling_qwen3_vl.py, `get_rope_index`).

    Args:
        ids: `[n]`.
        grids: of the document's pictures, all of which lie in it.

    Raises:
        DataError: the document has more or fewer tokens of pictures.
    """
    at_picture = ids == rules.image_token
    expected = sum(map(rules.count_tokens, grids))
    if int(at_picture.sum()) != expected:
        raise DataError(
            f"{int(at_picture.sum())} tokens of pictures, {expected} expected", "give --data.cache a new folder"
        )
    found = np.empty((3, len(ids)), dtype=np.int64)
    token = position = 0
    for grid in grids:
        start = token + int(np.argmax(at_picture[token:]))
        found[:, token:start] = np.arange(start - token) + position
        position += start - token
        rows, columns = grid[0] // rules.merge, grid[1] // rules.merge
        token = start + rows * columns
        found[0, start:token] = position
        found[1, start:token] = position + np.repeat(np.arange(rows), columns)
        found[2, start:token] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
    found[:, token:] = np.arange(len(ids) - token) + position
    return found
