"""Patches of pictures are those of transformers' own processor, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from anabatic.core.errors import ConfigError, DataError
from anabatic.data.vision.patches import make_patches
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.rule_files import read_picture_rules

CONFIG = {
    "image_token_id": 5,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
SQUARE = {"height": 32, "width": 32}
SIZES = ((64, 64), (100, 37), (31, 500), (9, 9), (700, 600))
"""Smaller than the smallest, larger than the largest, and of odd sides."""


def write_rules(folder: Path, patch: int = 16, **more: object) -> PictureRules:
    values = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 2048, "max_pixels": 131072}
    (folder / "preprocessor_config.json").write_text(json.dumps(values | more))
    config = CONFIG | {"vision_config": {**CONFIG["vision_config"], "patch_size": patch}}  # type: ignore[dict-item]
    return read_picture_rules(folder, config)


def make_tile_config(side: int) -> dict[str, Any]:
    tower = {"image_size": [side, side], "patch_size": [8, 8]}
    return {"image_token_id": 5, "downsample_ratio": 0.5, "vision_config": tower}


def write_tile_rules(folder: Path, fewest: int, most: int) -> PictureRules:
    values = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": SQUARE}
    values |= {"min_patches": fewest, "max_patches": most}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return read_picture_rules(folder, make_tile_config(32))


def draw_noise(size: tuple[int, int], mode: str) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(pixels[..., :3]).convert(mode)


@pytest.mark.parametrize("size", [*SIZES, (20, 27), (2000, 12)], ids=str)
def test_patches_of_glm_equal_its_processor(tmp_path: Path, size: tuple[int, int]) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"shortest_edge": 12544, "longest_edge": 131072}})
    )
    tower = {**CONFIG["vision_config"], "patch_size": 14}  # type: ignore[dict-item]
    rules = read_picture_rules(
        tmp_path, {"image_token_id": 5, "image_start_token_id": 3, "image_end_token_id": 4, "vision_config": tower}
    )
    image = draw_noise(size, "RGB")
    processor = Glm4vImageProcessorPil(size={"shortest_edge": 12544, "longest_edge": 131072})
    expected = processor([image], return_tensors="np")
    grid = rules.fit_grid(size[1], size[0])
    assert (1, *grid) == tuple(expected["image_grid_thw"][0])
    np.testing.assert_array_equal(make_patches(image, rules), expected["pixel_values"])


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_equal_the_processor(tmp_path: Path, size: tuple[int, int], patch: int) -> None:
    rules = write_rules(tmp_path, patch, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3])
    image = draw_noise(size, "RGB")
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 2048, "longest_edge": 131072}, patch_size=patch, image_mean=[0.4, 0.5, 0.6],
        image_std=[0.2, 0.25, 0.3],
    )  # fmt: skip
    expected = processor([image], return_tensors="np")
    grid = rules.fit_grid(size[1], size[0])
    assert expected["image_grid_thw"].tolist() == [[1, *grid]]
    np.testing.assert_array_equal(make_patches(image, rules), expected["pixel_values"])


@pytest.mark.parametrize("size", [*SIZES, (600, 300), (96, 64), (64, 96), (40, 150), (1000, 30)], ids=str)
@pytest.mark.parametrize("bounds", [(1, 6), (1, 12), (3, 4), (1, 1)], ids=str)
def test_tiles_equal_the_processor(tmp_path: Path, size: tuple[int, int], bounds: tuple[int, int]) -> None:
    rules = write_tile_rules(tmp_path, *bounds)
    image = draw_noise(size, "RGB")
    processor = GotOcr2ImageProcessorPil(size=SQUARE, min_patches=bounds[0], max_patches=bounds[1])
    expected = processor([image], crop_to_patches=True, return_tensors="np")
    grid = rules.fit_grid(size[1], size[0])
    assert grid == (expected["num_patches"][0], 1) and rules.count_tokens(grid) == 4 * grid[0]
    np.testing.assert_array_equal(make_patches(image, rules).reshape(-1, 3, 32, 32), expected["pixel_values"])


def test_tiles_are_described_as_the_processor_reads_them(tmp_path: Path) -> None:
    rules = write_tile_rules(tmp_path, 1, 6)
    assert rules.describe_sizes() == {"min_patches": 1, "max_patches": 6}
    config = make_tile_config(32)
    fewer = read_picture_rules(tmp_path, config, max_pixels=3 * 32**2 + 7)
    assert fewer.describe_sizes() == {"min_patches": 1, "max_patches": 3}
    with pytest.raises(DataError, match="patches of 32 pixels, 1 on a side of a token; config.json has 64"):
        read_picture_rules(tmp_path, make_tile_config(64))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
    with pytest.raises(DataError, match="is of a CLIPImageProcessor"):
        read_picture_rules(tmp_path, config)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_other_modes_equal_the_processor(tmp_path: Path, mode: str) -> None:
    rules = write_rules(tmp_path)
    suffix = "tif" if mode == "CMYK" else "png"
    draw_noise((70, 50), mode).save(tmp_path / f"a.{suffix}")
    size = {"shortest_edge": 2048, "longest_edge": 131072}
    with Image.open(tmp_path / f"a.{suffix}") as opened:
        expected = Qwen2VLImageProcessorPil(size=size, patch_size=16)([opened], return_tensors="np")["pixel_values"]
    image = load_picture(str(tmp_path / f"a.{suffix}"))
    np.testing.assert_array_equal(make_patches(image, rules), expected)


def test_a_turned_photo_stands_upright(tmp_path: Path) -> None:
    image = draw_noise((80, 40), "RGB")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif)
    assert load_picture(str(tmp_path / "a.jpg")).size == (40, 80)


def test_rules_come_from_the_folder_and_settings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no preprocessor_config.json"):
        read_picture_rules(tmp_path, CONFIG)
    inner = {"image_processor": {"patch_size": 16, "size": {"shortest_edge": 99, "longest_edge": 999999}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(inner))
    assert read_picture_rules(tmp_path, CONFIG).min_pixels == 99
    assert read_picture_rules(tmp_path, CONFIG, min_pixels=100, max_pixels=2000).max_pixels == 2000
    with pytest.raises(ConfigError, match="at least 99 and at most 50 pixels"):
        read_picture_rules(tmp_path, CONFIG, max_pixels=50)
    with pytest.raises(DataError, match="patches of 14 pixels"):
        write_rules(tmp_path, 14)
        read_picture_rules(tmp_path, CONFIG)
