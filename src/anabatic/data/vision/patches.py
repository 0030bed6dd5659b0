"""A picture as the patches that a tower reads: resized, normalized, and cut in the order of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anabatic.data.vision.picture_rules import PictureRules


def make_patches(image: Any, rules: PictureRules) -> np.ndarray:
    """Return float32 `[patches, 3 * frames * patch * patch]` of a picture in RGB, Pillow's image.

    The patches of a token are next to each other; `frames` equal frames make a still picture a clip.
    """
    return cut_sheets(resize_picture(image, rules), rules)


def resize_picture(image: Any, rules: PictureRules) -> list[np.ndarray]:
    """Return uint8 `[height, width, 3]` of a picture in each size in which it is cut into patches."""
    sizes = [(columns * rules.patch, rows * rules.patch) for rows, columns in rules.list_sheets(*image.size[::-1])]
    return [np.asarray(image if image.size == size else image.resize(size, resample=rules.resample)) for size in sizes]


def cut_sheets(sheets: Sequence[np.ndarray], rules: PictureRules) -> np.ndarray:
    """Return the patches of what `resize_picture` made, normalized."""
    return np.concatenate([_cut_sheet(sheet, rules) for sheet in sheets])


def _cut_sheet(pixels: np.ndarray, rules: PictureRules) -> np.ndarray:
    values = np.stack([table[pixels[..., color]] for color, table in enumerate(_make_tables(rules))])
    merge, patch = rules.merge, rules.patch
    rows, columns = (side // patch for side in pixels.shape[:2])
    cells = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    cells = cells.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    cells = np.broadcast_to(cells, (*cells.shape[:5], rules.frames, patch, patch))
    return cells.reshape(rows * columns, -1)


def _make_tables(rules: PictureRules) -> list[np.ndarray]:
    """Return for each color the normalized value of each byte, float32: rounded where the processor rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rules.scale).astype(np.float32)
    means, deviations = np.asarray(rules.mean, np.float32), np.asarray(rules.std, np.float32)
    return [(scaled - mean) / deviation for mean, deviation in zip(means, deviations, strict=True)]
