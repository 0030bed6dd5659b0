"""Load a model to ask: its weights with adapters, its tokenizer, and how it reads pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedModel

from anabatic.data.chat import custom_templates
from anabatic.data.tokenizer import hf_folder
from anabatic.device.device import Device
from anabatic.models import classifier
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    load_config,
    load_model,
    require_engine_model,
    require_tokenizer_fits,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)

if TYPE_CHECKING:
    from anabatic.infer.picture_prompts import PictureReader


@dataclass(frozen=True)
class LoadedModel:
    """A model that is asked.

    Attributes:
        pictures: reads its pictures; None: it sees none.
    """

    folder: Path
    model: PreTrainedModel
    tokenizer: Any
    pictures: PictureReader | None


def load_model_to_ask(
    path: str | Path,
    device: Device,
    adapters: Sequence[str] = (),
    chat_template: str | None = None,
    quantize: Literal["none", "int8", "nf4"] = "none",
) -> LoadedModel:
    """Load a model, an adapter on its base model, or the model of a run.

    Args:
        adapters: merged into the weights.
        chat_template: in place of the tokenizer's own.

    Raises:
        ConfigError: it is a classifier.
        DataError: the model or its tokenizer cannot be used.
    """
    folder = resolve_model_folder(path)
    classifier.require_text_model(folder)
    require_engine_model(folder)
    merged = resolve_merged_adapters(adapters, folder)
    tokens = custom_templates.folder_with_template(find_tokenizer_folder(folder, merged), chat_template)
    tokenizer = hf_folder.load_tokenizer(tokens)
    require_tokenizer_fits(load_config(folder), tokenizer, folder)
    model = load_model(folder, device.torch_device, device.dtype, merged, quantize)
    return LoadedModel(folder, model, tokenizer, load_picture_reader(model, tokenizer, folder))


def load_picture_reader(model: PreTrainedModel, tokenizer: Any, folder: Path) -> PictureReader | None:
    """Return what reads pictures for a model; None: it sees none, or has no chat template.

    Args:
        folder: of the model, or of an adapter.

    Raises:
        DataError: the files of its processor are missing or damaged.
    """
    if getattr(model.config, "vision_config", None) is None:
        return None
    from anabatic.data.vision.rule_files import read_picture_rules
    from anabatic.infer.picture_prompts import make_picture_reader
    from anabatic.models.vision.processor_files import find_processor_folder

    files = find_processor_folder(folder, resolve_base_folder(folder))
    return make_picture_reader(tokenizer, read_picture_rules(files, model.config.to_dict()))
