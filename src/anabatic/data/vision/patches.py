"""A picture as the patches that a tower reads: resized, normalized, and cut in the order of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from anabatic.data.vision.picture_rules import PictureRules


def make_patches(image: Any, rules: PictureRules) -> np.ndarray:
    """Return float32 `[patches, 3 * frames * patch * patch]` of a picture in RGB, Pillow's image.

    The patches of a token are next to each other; `frames` equal frames make a still picture a clip.
    """
    sheets = rules.list_sheets(image.height, image.width)
    return np.concatenate([_cut_sheet([image], rules, *grid) for grid in sheets])


def make_clip_patches(images: Iterable[Any], rules: PictureRules, grid: tuple[int, int]) -> np.ndarray:
    """Return the patches of a video, as of `make_patches`, one temporal patch after the other.

    Args:
        images: its frames, Pillow's images in RGB; a multiple of `rules.frames`.
        grid: rows and columns of patches.
    """
    shown = iter(images)
    clips = iter(lambda: list(islice(shown, rules.frames)), [])
    return np.concatenate([_cut_sheet(clip, rules, *grid) for clip in clips])


def _cut_sheet(images: Sequence[Any], rules: PictureRules, rows: int, columns: int) -> np.ndarray:
    size = (columns * rules.patch, rows * rules.patch)
    tables, merge, patch = _make_tables(rules), rules.merge, rules.patch
    shown = [np.asarray(one if one.size == size else one.resize(size, resample=rules.resample)) for one in images]
    values = np.stack([table[pixels[..., color]] for pixels in shown for color, table in enumerate(tables)])
    cells = values.reshape(len(shown), 3, rows // merge, merge, patch, columns // merge, merge, patch)
    cells = cells.transpose(2, 5, 3, 6, 1, 0, 4, 7)
    cells = np.broadcast_to(cells, (*cells.shape[:5], rules.frames, patch, patch))
    return cells.reshape(rows * columns, -1)


def _make_tables(rules: PictureRules) -> list[np.ndarray]:
    """Return for each color the normalized value of each byte, float32: rounded where the processor rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rules.scale).astype(np.float32)
    means, deviations = np.asarray(rules.mean, np.float32), np.asarray(rules.std, np.float32)
    return [(scaled - mean) / deviation for mean, deviation in zip(means, deviations, strict=True)]
