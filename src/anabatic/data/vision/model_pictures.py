"""Choose how a model reads pictures: packed, by the arithmetic of `picture_rules`, or by its own processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabatic.data.batching.packing import CollateFn
from anabatic.data.vision.own_processor import CollateRows, ProcessorRenderer, ProcessorRules, read_processor_rules
from anabatic.data.vision.picture_batch import CollatePictures
from anabatic.data.vision.picture_encoder import PictureRenderer
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.rule_files import read_picture_rules
from anabatic.plan.model_shape import packs_pictures

ModelPictures = PictureRules | ProcessorRules


def read_model_pictures(
    folder: Path, tokenizer_folder: Path, config: Mapping[str, Any], **bounds: int | None
) -> ModelPictures:
    """Return how a model reads pictures; arguments and errors as of `read_picture_rules` and `read_processor_rules`."""
    if packs_pictures(config):
        return read_picture_rules(folder, config, **bounds)
    return read_processor_rules(folder, tokenizer_folder)


def make_renderer(tokenizer: Any, pictures: ModelPictures, limit: int | None) -> PictureRenderer | ProcessorRenderer:
    """Return what renders conversations with pictures.

    Args:
        limit: tokens of a conversation with pictures at most; None: any number.
    """
    if isinstance(pictures, PictureRules):
        return PictureRenderer(tokenizer, pictures, limit)
    return ProcessorRenderer(tokenizer, pictures, limit)


def make_collate(pictures: ModelPictures, collate: CollateFn) -> CollateFn:
    """Return what lays pieces into batches as `collate` does, with their pictures."""
    if isinstance(pictures, PictureRules):
        return CollatePictures(pictures, collate)
    return CollateRows(pictures, collate)
