"""Rules of pictures and videos from the files of a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.vision.picture_rules import PictureRules, TileRules, VideoRules

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
_BICUBIC = 3
"""Pillow's number, the default of these processors."""
_PROCESSORS = {True: ("Qwen", "Glm4"), False: ("GotOcr2",)}
"""Whether pictures are grids -> how the names begin of image processors whose arithmetic is that of this module."""
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Defaults of the processor: those of OpenAI's CLIP."""
_HALVES = (0.5, 0.5, 0.5)
_VIDEO_KINDS = {
    "qwen2_5_vl": ("Qwen2VL",),
    "qwen3_vl": ("Qwen3VL",),
    "qwen3_5": ("Qwen3VL",),
    "glm46v": ("Glm46V", "Glm4v"),
    "glm4v": ("Glm4v", "Glm46V"),
}
"""How the type of a model begins -> whose rules its videos may follow; the first where its folder names none."""
_BOX_FORMS = {"qwen2_5_vl": "", "qwen3_vl": "", "qwen3_5": "", "glm4": "GLM", "internvl": "InternVL"}
"""How the type of a model begins -> how its boxes are written; empty: as the setting says."""
_VIDEO_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VL": dict(min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28, budget=128_000),
    "Qwen3VL": dict(min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32, budget=768),
    "Glm4v": dict(min_pixels=112 * 112, max_pixels=60_000 * 28 * 28, max_frames=600),
    "Glm46V": dict(min_pixels=112 * 112, max_pixels=60_000 * 28 * 28, max_frames=640),
}
"""Of transformers' classes; `fps` of Qwen2VL, which has none, is that of qwen-vl-utils."""


def read_picture_rules(folder: Path, config: Mapping[str, Any], **bounds: Any) -> PictureRules:
    """Return the rules of a model folder.

    Args:
        config: the model's config.json.
        bounds: of `PictureSizes`, in place of the folder's own.

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
        sizes |= {key: bounds[key] for key in ("min_pixels", "max_pixels") if bounds.get(key) is not None}
        model = str(config.get("model_type"))
        form = next((form for name, form in _BOX_FORMS.items() if model.startswith(name)), None)
        rules: PictureRules = kind(
            image_token=int(config["image_token_id"]),
            resample=int(values.get("resample", _BICUBIC)),
            scale=float(values.get("rescale_factor", 1 / 255)) if values.get("do_rescale", True) else 1.0,
            mean=_read_colors(values, "image_mean", _CLIP_MEAN, 0.0),
            std=_read_colors(values, "image_std", _CLIP_STD, 1.0),
            box_form="" if form is None else form or str(bounds.get("boxes") or "tokens"),
            boxes_are_thousandths=model != "qwen2_5_vl",
            **sizes,
        )
        if is_grid:
            rules = replace(rules, video=_read_video_rules(folder, config, rules, bounds))
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


def _read_video_rules(
    folder: Path, config: Mapping[str, Any], rules: PictureRules, bounds: Mapping[str, Any]
) -> VideoRules | None:
    """Return the rules of videos, of the folder's file or of the class of the processor; None: none that is known."""
    found = _find_part(folder, ((PROCESSOR_FILE, "video_processor"), (VIDEO_FILE, None)))
    values = found[1] if found else {}
    model = str(config.get("model_type"))
    known = next((kinds for name, kinds in _VIDEO_KINDS.items() if model.startswith(name)), ("",))
    kind = str(values.get("video_processor_type") or known[0]).removesuffix("VideoProcessor")
    if kind not in known or not kind or config.get("video_token_id") is None:
        return None
    size = values.get("size") or {}
    colors = {"mean": _HALVES, "std": _HALVES} if kind == "Qwen3VL" else {"mean": _CLIP_MEAN, "std": _CLIP_STD}
    is_glm, tower = kind.startswith("Glm"), config["vision_config"]
    chosen = {
        **_VIDEO_DEFAULTS[kind],
        **{ours: size[theirs] for ours, theirs in _SIZE_NAMES.items() if size.get(theirs)},
        **{key: values[key] for key in _VIDEO_NUMBERS if values.get(key) is not None},
    }
    if not values.get("cap_pixels_per_frame"):
        chosen["budget"] = 0
    elif values.get("max_video_tokens"):
        chosen["budget"] = int(values["max_video_tokens"])
    given = {"max_pixels": bounds.get("video_max_pixels"), **{key: bounds.get(key) for key in ("fps", "max_frames")}}
    if kind == "Glm46V" and given["fps"] or is_glm and given["max_frames"]:
        setting = "vision.fps" if given["fps"] else "vision.max_frames"
        raise ConfigError(f"{setting} is given, and {kind} chooses frames by a video's duration", "leave it out")
    chosen |= {key: value for key, value in given.items() if value is not None}
    base = {each.name: getattr(rules, each.name) for each in fields(PictureRules) if each.name != "video"}
    base |= {"counts_frames": kind != "Qwen2VL", "resample": int(values.get("resample", _BICUBIC))}
    video = VideoRules(
        **base
        | {key: _read_colors(values, f"image_{key}", usual, float(key == "std")) for key, usual in colors.items()}
        | chosen
        | {"image_token": rules.image_token if is_glm else int(config["video_token_id"])},
        kind=kind,
        written_token=int(config["video_token_id"]),
        positions_per_second=float(tower.get("tokens_per_second", 4)) if kind == "Qwen2VL" else 0.0,
    )
    if min(video.fps, video.max_frames, video.min_frames, video.max_duration, video.min_pixels) <= 0:
        raise ValueError("a size or a number of frames of videos is not above 0")
    return video


_SIZE_NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_VIDEO_NUMBERS = ("fps", "min_frames", "max_frames", "max_duration", "min_pixels", "max_pixels")


def _read_processor(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return what describes the pictures: a file of its own, or a part of the processor's (transformers 5)."""
    if found := _find_part(folder, ((PREPROCESSOR_FILE, None), (PROCESSOR_FILE, "image_processor"))):
        return found
    raise DataError(
        f"{folder} has no {PREPROCESSOR_FILE}, which says what the model's pictures are like",
        "copy all files of the model, not its weights alone",
    )


def _find_part(folder: Path, places: tuple[tuple[str, str | None], ...]) -> tuple[Path, dict[str, Any]] | None:
    """Return the first of some files, or parts of them, that is there."""
    for name, part in places:
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
    return None


def _read_colors(values: Mapping[str, Any], name: str, usual: tuple[float, ...], off: float) -> tuple[float, ...]:
    """Return a number for each of three colors."""
    if not values.get("do_normalize", True):
        return (off,) * 3
    found = values.get(name, usual)
    colors = tuple(float(each) for each in (found if isinstance(found, (list, tuple)) else [found] * 3))
    if len(colors) != 3:
        raise ValueError(f"{name} has {len(colors)} numbers")
    return colors
