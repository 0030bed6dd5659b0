"""A picture as the patches that a tower reads: resized, normalized, and cut in the order of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from anabatic.data.vision.picture_rules import PictureRules


def make_patches(image: Any, rules: PictureRules) -> np.ndarray:
    """Return float32 `[patches, 3 * frames * patch * patch]` of a picture in RGB, Pillow's image.

    The patches of a token are next to each other; `frames` equal frames make a still picture a clip.
    """
    return np.concatenate([_cut_sheet(image, rules, *grid) for grid in rules.list_sheets(image.height, image.width)])


def _cut_sheet(image: Any, rules: PictureRules, rows: int, columns: int) -> np.ndarray:
    size = (columns * rules.patch, rows * rules.patch)
    pixels = np.asarray(image if image.size == size else image.resize(size, resample=rules.resample))
    values = np.stack([table[pixels[..., color]] for color, table in enumerate(_make_tables(rules))])
    merge, patch = rules.merge, rules.patch
    cells = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
    cells = cells.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    cells = np.broadcast_to(cells, (*cells.shape[:5], rules.frames, patch, patch))
    return cells.reshape(rows * columns, -1)


def _make_tables(rules: PictureRules) -> list[np.ndarray]:
    """Return for each color the normalized value of each byte, float32: rounded where the processor rounds."""
    scaled = (np.arange(256, dtype=np.float64) * rules.scale).astype(np.float32)
    means, deviations = np.asarray(rules.mean, np.float32), np.asarray(rules.std, np.float32)
    return [(scaled - mean) / deviation for mean, deviation in zip(means, deviations, strict=True)]
