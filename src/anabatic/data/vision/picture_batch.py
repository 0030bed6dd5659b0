"""Collates segments with pictures: patches as one sequence, and positions of tokens in three axes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.data.batching.packing import Batch, CollateFn, TokenSegment, collate_packed
from anabatic.data.vision.patches import cut_sheets, make_patches, resize_picture
from anabatic.data.vision.picture_files import decode_picture, load_picture, make_name, read_bytes
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.picture_tensors import Grid, PictureBatch, PictureGrid

ENCODING = ("utf-8", "surrogateescape")
"""Of names of files, which may be any bytes."""


@dataclass(frozen=True)
class CollatePictures:
    """Lays pieces as another `CollateFn` does, with their pictures; a `CollateFn`."""

    rules: PictureRules
    collate: CollateFn = collate_packed

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
        return self.add_pictures(self.collate(pieces, capacity, pad_id, seq_len, state))

    def add_pictures(self, batch: Batch) -> Batch:
        """Read the pictures that a batch names; return the batch."""
        if batch.picture_names:
            batch.pictures = self._read_pictures(batch)
        return batch

    def _read_pictures(self, batch: Batch) -> PictureBatch:
        positions = batch.position_ids.numpy()[None].repeat(self.rules.axes, axis=0)
        shown: list[PictureGrid] = []
        for number, names in enumerate(batch.picture_names):
            if not names:
                continue
            start, stop = batch.cu_seqlens[number : number + 2]
            pictures = list_pictures(names)
            ids = batch.input_ids[start:stop].numpy()
            positions[:, start:stop] = make_positions(
                ids, [(rows, columns) for _, rows, columns in pictures], self.rules
            )
            shown += pictures
        pixels, grids = _read_all_patches(shown, self.rules)
        return PictureBatch(pixels, grids, torch.from_numpy(positions))


def list_pictures(names: bytes) -> list[PictureGrid]:
    """Return the pictures that a shard has kept, as `pack_grids` writes them."""
    return [(source, rows, columns) for source, rows, columns in json_reader.loads(names.decode(*ENCODING))]


def pack_grids(pictures: Sequence[PictureGrid]) -> bytes:
    """Return pictures and their grids as a shard keeps them, in one line."""
    return json.dumps(pictures, ensure_ascii=False, separators=(",", ":")).encode(*ENCODING)


def read_pictures(ids: np.ndarray, pictures: Sequence[PictureGrid], rules: PictureRules) -> PictureBatch:
    """Return the pictures of a document whose tokens are `ids`.

    Raises:
        DataError: a picture is not what it was when it was measured, or has other tokens.
    """
    pixels, grids = _read_all_patches(pictures, rules)
    return PictureBatch(pixels, grids, torch.from_numpy(make_positions(ids, grids, rules)))


def _read_all_patches(pictures: Sequence[PictureGrid], rules: PictureRules) -> tuple[torch.Tensor, list[Grid]]:
    """Decode pictures on all cores: Pillow works outside of Python's lock."""
    grids = [(rows, columns) for _, rows, columns in pictures]
    sources = [source for source, _, _ in pictures]
    with ThreadPoolExecutor(min(len(pictures), os.cpu_count() or 1)) as pool:
        patches = list(pool.map(_read_patches, sources, grids, [rules] * len(grids)))
    return torch.from_numpy(np.concatenate(patches)), grids


def _read_patches(source: str, grid: Grid, rules: PictureRules) -> np.ndarray:
    if rules.cache is None:
        return make_patches(_load_measured(source, load_picture(source), grid, rules), rules)
    data, cache = read_bytes(source), rules.cache
    entry = cache.name_entry(data, (rules.patch, rules.resample, rules.min_pixels, rules.max_pixels, *grid))
    if (kept := cache.find_sheets(entry)) is not None:
        return cut_sheets(kept, rules)
    sheets = resize_picture(_load_measured(source, decode_picture(data, source), grid, rules), rules)
    cache.keep_sheets(entry, sheets)
    return cut_sheets(sheets, rules)


def _load_measured(source: str, image: Any, grid: Grid, rules: PictureRules) -> Any:
    if rules.fit_grid(image.size[1], image.size[0]) != grid:
        raise DataError(
            f"{make_name(source)}: the picture has another size than when the rows were tokenised",
            "put the old picture back, or give --data.cache a new folder",
        )
    return image


def make_positions(ids: np.ndarray, grids: Sequence[Grid], rules: PictureRules) -> np.ndarray:
    """Return the positions of a document's tokens in time, height and width, int64 `[3, n]`; of tiles `[1, n]`.

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
    if rules.axes == 1:
        return np.arange(len(ids), dtype=np.int64)[None]
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
