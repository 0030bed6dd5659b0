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
    return cut_sheets(resize_picture(image, rules), rules)


def make_clip_patches(images: Iterable[Any], rules: PictureRules, grid: tuple[int, int]) -> np.ndarray:
    """Return the patches of a video, as of `make_patches`, one temporal patch after the other.

    Args:
        images: its frames, Pillow's images in RGB; a multiple of `rules.frames`.
        grid: rows and columns of patches.
    """
    shown = (_resize(one, grid, rules) for one in images)
    clips = iter(lambda: list(islice(shown, rules.frames)), [])
    return np.concatenate([_cut_clip(clip, rules) for clip in clips])


def resize_picture(image: Any, rules: PictureRules) -> list[np.ndarray]:
    """Return uint8 `[height, width, 3]` of a picture in each size in which it is cut into patches."""
    return [_resize(image, grid, rules) for grid in rules.list_sheets(image.height, image.width)]


def _resize(image: Any, grid: tuple[int, int], rules: PictureRules) -> np.ndarray:
    size = (grid[1] * rules.patch, grid[0] * rules.patch)
    return np.asarray(image if image.size == size else image.resize(size, resample=rules.resample))


def cut_sheets(sheets: Sequence[np.ndarray], rules: PictureRules) -> np.ndarray:
    """Return the patches of what `resize_picture` made, normalized."""
    return np.concatenate([_cut_clip([sheet], rules) for sheet in sheets])


def _cut_clip(shown: Sequence[np.ndarray], rules: PictureRules) -> np.ndarray:
    tables, merge, patch = _make_tables(rules), rules.merge, rules.patch
    rows, columns = (side // patch for side in shown[0].shape[:2])
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
