"""Sizes, normalization and tokens that a model wants of its pictures, from the files of its folder.

The arithmetic is that of transformers' Qwen2-VL image processors, which Qwen2.5-VL and Qwen3-VL share
(models/qwen2_vl/image_processing_pil_qwen2_vl.py), that of GLM-4V's (models/glm4v/image_processing_pil_glm4v.py), and
that of tiles of one size, which InternVL has (models/got_ocr2/image_processing_pil_got_ocr2.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabatic.core import json_reader
from anabatic.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from anabatic.data.vision.picture_cache import PictureCache

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
_BICUBIC = 3
"""Pillow's number, the default of these processors."""
MAX_RATIO = 200
"""Longer side over shorter side, at most."""
_PROCESSORS = {True: ("Qwen", "Glm4"), False: ("GotOcr2",)}
"""Whether pictures are grids -> how the names begin of image processors whose arithmetic is that of this module."""
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Defaults of the processor: those of OpenAI's CLIP."""


@dataclass(frozen=True)
class PictureRules:
    """What decides the patches and tokens of a picture.

    Attributes:
        image_token: id of the token that a picture is made of; start_token, end_token: those around it. None: those
            that the tokenizer names.
        patch: side of a patch in pixels; merge: patches on a side of a token; frames: equal frames of a still picture.
        min_pixels, max_pixels: of the resized picture.
        resample: Pillow's number of the filter.
        scale: factor on a value from 0 to 255, before `(x - mean) / std` for each color.
        counts_frames: the bounds count the pixels of all `frames`, and a side shorter than a token is made one first
            (GLM-4V).
        cache: keeps resized pictures; it decides nothing.
    """

    image_token: int
    start_token: int | None
    end_token: int | None
    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    counts_frames: bool = False
    cache: PictureCache | None = None

    axes = 3
    """Of positions: time, height and width."""
    adds_borders = False
    """The chat template leaves the tokens around a picture to the processor."""

    @property
    def unit(self) -> int:
        """Side of a token in pixels."""
        return self.patch * self.merge

    def fit_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches of a picture of so many pixels.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(f"one side is more than {MAX_RATIO} times the other ({width} x {height} pixels)")
        unit, frames = self.unit, self.frames if self.counts_frames else 1
        if self.counts_frames and min(height, width) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        # Python's round goes to the even number, as the processor's does.
        rows, columns = (round(side / unit) for side in (height, width))
        if frames * rows * columns * unit**2 > self.max_pixels:
            shrink = math.sqrt(frames * height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif frames * rows * columns * unit**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * self.merge, columns * self.merge

    def count_tokens(self, grid: tuple[int, int]) -> int:
        """Return the tokens of a picture with that many rows and columns of patches."""
        return grid[0] * grid[1] // self.merge**2

    def list_sheets(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the rows and columns of patches that a picture is resized to and cut into, one time or several."""
        return [self.fit_grid(height, width)]

    def describe_sizes(self) -> dict[str, Any]:
        """Return the sizes as the processor's file names them."""
        return {"size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}}


@dataclass(frozen=True)
class TileRules(PictureRules):
    """What decides the tiles of a picture, all of one size: a tile is a patch, and becomes a fixed number of tokens.

    Attributes:
        tile_tokens: tokens of a tile.
    """

    tile_tokens: int = 1

    axes = 1
    adds_borders = True

    def fit_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of tiles of a picture of so many pixels, and 1."""
        return sum(rows * columns for rows, columns in self.list_sheets(height, width)), 1

    def count_tokens(self, grid: tuple[int, int]) -> int:
        """Return the tokens of that many tiles."""
        return grid[0] * self.tile_tokens

    def describe_sizes(self) -> dict[str, Any]:
        """Return the numbers of tiles as the processor's file names them."""
        fewest, most = self.count_tiles()
        return {"min_patches": fewest, "max_patches": most}

    def count_tiles(self) -> tuple[int, int]:
        """Return the smallest and the largest number of tiles."""
        return max(1, math.ceil(self.min_pixels / self.patch**2)), max(1, self.max_pixels // self.patch**2)

    def list_sheets(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the rows and columns of tiles whose ratio is nearest to the picture's, and one tile that shows all of
        it; of equal ratios the larger one, unless that makes the picture more than twice as large."""
        area, (fewest, most) = self.patch**2, self.count_tiles()
        shapes = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
        best, nearest = (1, 1), math.inf
        for rows, columns in sorted(shapes, key=math.prod):
            distance = abs(width / height - columns / rows)
            is_large = distance == nearest and height * width > 0.5 * area * rows * columns
            if rows * columns >= fewest and (distance < nearest or is_large):
                best, nearest = (rows, columns), distance
        return [best] if best == (1, 1) else [best, (1, 1)]


def read_picture_rules(folder: Path, config: Mapping[str, Any], **bounds: int | None) -> PictureRules:
    """Return the rules of a model folder.

    Args:
        config: the model's config.json.
        bounds: `min_pixels` and `max_pixels` in place of the folder's own.

    Raises:
        ConfigError: the smallest size is above the largest.
        DataError: the folder has no description of its pictures, or a damaged one.
    """
    file, values = _read_processor(folder)
    kind_of_processor = str(values.get("image_processor_type") or "Qwen2VL")
    tower = config["vision_config"]
    is_grid = "spatial_merge_size" in tower
    if not kind_of_processor.startswith(_PROCESSORS[is_grid]):
        raise DataError(
            f"{file} is of a {kind_of_processor}, which reads pictures otherwise", "use the model's own file"
        )
    try:
        kind, sizes = (
            (PictureRules, _read_grids(config, values)) if is_grid else (TileRules, _read_tiles(config, values))
        )
        sizes |= {key: value for key, value in bounds.items() if value is not None}
        rules = kind(
            image_token=int(config["image_token_id"]),
            resample=int(values.get("resample", _BICUBIC)),
            scale=float(values.get("rescale_factor", 1 / 255)) if values.get("do_rescale", True) else 1.0,
            mean=_read_colors(values, "image_mean", _CLIP_MEAN, 0.0),
            std=_read_colors(values, "image_std", _CLIP_STD, 1.0),
            **sizes,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: no description of pictures that is known here: {error!r}", "copy it again") from error
    if min(rules.patch, rules.merge, rules.frames, rules.min_pixels, *(each > 0 for each in rules.std)) < 1:
        raise DataError(f"{file}: a size or a deviation is not above 0", "copy it again")
    if rules.min_pixels > rules.max_pixels:
        raise ConfigError(
            f"pictures have at least {rules.min_pixels:,} and at most {rules.max_pixels:,} pixels",
            "set vision.min_pixels and vision.max_pixels to sizes that fit each other",
        )
    expected = (
        (tower.get("patch_size"), tower["spatial_merge_size"]) if is_grid else (_read_side(tower["image_size"]), 1)
    )
    if (rules.patch, rules.merge) != expected:
        raise DataError(
            f"{file}: patches of {rules.patch} pixels, {rules.merge} on a side of a token; config.json has"
            f" {expected[0]} and {expected[1]}",
            "use the files of one model",
        )
    return rules


def _read_grids(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of patches, and the tokens around them."""
    tower, size = config["vision_config"], values.get("size")
    size = size if isinstance(size, Mapping) else {}
    kind = "image" if "image_start_token_id" in config else "vision"
    is_glm = kind == "image"
    return {
        "start_token": int(config[f"{kind}_start_token_id"]),
        "end_token": int(config[f"{kind}_end_token_id"]),
        "patch": int(values.get("patch_size") or tower["patch_size"]),
        "merge": int(values.get("merge_size") or tower["spatial_merge_size"]),
        "frames": int(values.get("temporal_patch_size") or tower["temporal_patch_size"]),
        "min_pixels": int(values.get("min_pixels") or size.get("shortest_edge") or (112 * 112 if is_glm else 56 * 56)),
        "max_pixels": int(
            values.get("max_pixels") or size.get("longest_edge") or 28 * 28 * (15000 if is_glm else 1280)
        ),
        "counts_frames": is_glm,
    }


def _read_tiles(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of tiles and of their tokens, squares of patches, and how many of them a picture has."""
    tower, side = config["vision_config"], int(values["size"]["height"])
    features = side // _read_side(tower["patch_size"]) * float(config["downsample_ratio"])
    return {
        **dict(start_token=None, end_token=None, patch=side, merge=1, frames=1, tile_tokens=int(features) ** 2),
        "min_pixels": int(values.get("min_patches", 1)) * side**2,
        "max_pixels": int(values.get("max_patches", 12)) * side**2,
    }


def _read_side(value: Any) -> int:
    """Return the side of a square, which may be written as height and width."""
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def _read_processor(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return what describes the pictures: a file of its own, or a part of the processor's (transformers 5)."""
    for name, part in ((PREPROCESSOR_FILE, None), (PROCESSOR_FILE, "image_processor")):
        file = folder / name
        if not file.is_file():
            continue
        try:
            tree = json_reader.read_json_file(file)
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}", "copy it again") from error
        values = tree.get(part) if part and isinstance(tree, dict) else tree
        if isinstance(values, dict):
            return file, values
    raise DataError(
        f"{folder} has no {PREPROCESSOR_FILE}, which says what the model's pictures are like",
        "copy all files of the model, not its weights alone",
    )


def _read_colors(values: Mapping[str, Any], name: str, usual: tuple[float, ...], off: float) -> tuple[float, ...]:
    """Return a number for each of three colors."""
    if not values.get("do_normalize", True):
        return (off,) * 3
    found = values.get(name, usual)
    colors = tuple(float(each) for each in (found if isinstance(found, (list, tuple)) else [found] * 3))
    if len(colors) != 3:
        raise ValueError(f"{name} has {len(colors)} numbers")
    return colors
