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
from anabatic.data.vision.patches import cut_sheets, make_clip_patches, make_patches, resize_picture
from anabatic.data.vision.picture_files import decode_picture, load_picture, make_name, read_bytes
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.picture_tensors import Grid, PictureBatch, PictureGrid
from anabatic.data.vision.video_files import read_frames

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
            positions[:, start:stop] = make_positions(ids, pictures, self.rules)
            shown += pictures
        pixels, grids = _read_all_patches(shown, self.rules)
        return PictureBatch(pixels, grids, torch.from_numpy(positions))


def list_pictures(names: bytes) -> list[PictureGrid]:
    """Return the pictures that a shard has kept, as `pack_grids` writes them."""
    return [PictureGrid(*each) for each in json_reader.loads(names.decode(*ENCODING))]


def pack_grids(pictures: Sequence[PictureGrid]) -> bytes:
    """Return pictures and their grids as a shard keeps them, in one line."""
    short = [each if each.frames else each[:3] for each in pictures]
    return json.dumps(short, ensure_ascii=False, separators=(",", ":")).encode(*ENCODING)


def read_pictures(ids: np.ndarray, pictures: Sequence[PictureGrid], rules: PictureRules) -> PictureBatch:
    """Return the pictures of a document whose tokens are `ids`.

    Raises:
        DataError: a picture is not what it was when it was measured, or has other tokens.
    """
    pixels, grids = _read_all_patches(pictures, rules)
    return PictureBatch(pixels, grids, torch.from_numpy(make_positions(ids, pictures, rules)))


def _read_all_patches(pictures: Sequence[PictureGrid], rules: PictureRules) -> tuple[torch.Tensor, list[Grid]]:
    """Decode pictures on all cores: Pillow and PyAV work outside of Python's lock."""
    with ThreadPoolExecutor(min(len(pictures), os.cpu_count() or 1)) as pool:
        patches = list(pool.map(_read_patches, pictures, [rules] * len(pictures)))
    grids = [picture.grid for picture in pictures for _ in range(picture.times)]
    return torch.from_numpy(np.concatenate(patches)), grids


def _read_patches(picture: PictureGrid, rules: PictureRules) -> np.ndarray:
    if picture.frames:
        assert rules.video is not None
        return make_clip_patches(read_frames(picture.source, picture.frames), rules.video, picture.grid)
    if rules.cache is None:
        return make_patches(_require_measured(load_picture(picture.source), picture, rules), rules)
    data, cache = read_bytes(picture.source), rules.cache
    entry = cache.name_entry(data, (rules.patch, rules.resample, rules.min_pixels, rules.max_pixels, *picture.grid))
    if (kept := cache.find_sheets(entry)) is not None:
        return cut_sheets(kept, rules)
    image = decode_picture(data, picture.source)
    sheets = resize_picture(_require_measured(image, picture, rules), rules)
    cache.keep_sheets(entry, sheets)
    return cut_sheets(sheets, rules)


def _require_measured(image: Any, picture: PictureGrid, rules: PictureRules) -> Any:
    if rules.fit_grid(image.size[1], image.size[0]) != picture.grid:
        raise DataError(
            f"{make_name(picture.source)}: the picture has another size than when the rows were tokenised",
            "put the old picture back, or give --data.cache a new folder",
        )
    return image


def make_positions(ids: np.ndarray, pictures: Sequence[PictureGrid], rules: PictureRules) -> np.ndarray:
    """Return the positions of a document's tokens in time, height and width, int64 `[3, n]`; of tiles `[1, n]`.

    Text counts on in all three; a picture is at one time, its tokens at their row and column, and what follows begins
    behind its longer side (transformers, models/qwen3_vl/modeling_qwen3_vl.py, `get_rope_index`). Temporal patches of a
    video without text between them are `interval` apart in time (models/qwen2_5_vl/modeling_qwen2_5_vl.py).

    Args:
        ids: `[n]`.
        pictures: of the document, all of which lie in it.

    Raises:
        DataError: the document has more or fewer tokens of pictures.
    """
    at_picture = rules.find_features(ids)
    expected = sum(rules.count_tokens(one.grid) * one.times for one in pictures)
    if int(at_picture.sum()) != expected:
        raise DataError(
            f"{int(at_picture.sum())} tokens of pictures, {expected} expected", "give --data.cache a new folder"
        )
    if rules.axes == 1:
        return np.arange(len(ids), dtype=np.int64)[None]
    found = np.empty((3, len(ids)), dtype=np.int64)
    token = position = 0
    for picture, times in ((each, times) for each in pictures for times in each.runs):
        start = token + int(np.argmax(at_picture[token:]))
        found[:, token:start] = np.arange(start - token) + position
        position += start - token
        rows, columns = picture.rows // rules.merge, picture.columns // rules.merge
        token = start + times * rows * columns
        seconds = (np.arange(times, dtype=np.float32) * np.float32(picture.interval)).astype(np.int64)
        found[0, start:token] = position + np.repeat(seconds, rows * columns)
        found[1, start:token] = position + np.tile(np.repeat(np.arange(rows), columns), times)
        found[2, start:token] = position + np.tile(np.arange(columns), times * rows)
        position += max(rows, columns)
    found[:, token:] = np.arange(len(ids) - token) + position
    return found
