"""The folder of a classifier: a model's, with its head and `classifier.json` beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.core.paths import write_atomic
from anabatic.models import pretrained, weight_files
from anabatic.models.classifier import (
    DESCRIPTION_FILE,
    ClassifierDescription,
    attach_class_head,
    get_class_head,
    is_classifier,
)
from anabatic.parallel.sharded_tensors import copy_from_full, gather_full_tensor

HEAD_WEIGHTS_FILE = "classifier.safetensors"


def save_classifier(
    model: PreTrainedModel,
    folder: Path,
    tokenizer: Any,
    description: ClassifierDescription,
    files: Mapping[str, str | bytes],
    is_writer: bool = True,
) -> None:
    """Write a Hugging Face folder of the model with its head, atomically. All ranks call it.

    Args:
        files: name -> content of further files of the folder.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    head = {
        name: gather_full_tensor(value.detach()).cpu().contiguous()
        for name, value in get_class_head(model).state_dict().items()
    }

    def write_head(temporary: Path) -> None:
        save_file(head, temporary / HEAD_WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(asdict(description), ensure_ascii=False, indent=1)
        for name, content in {DESCRIPTION_FILE: text + "\n", **files}.items():
            write_atomic(temporary / name, content)

    pretrained.save_model(model, folder, tokenizer, is_writer, write_head)


Description = TypeVar("Description", bound=ClassifierDescription)


def read_description(folder: Path, kind: type[Description]) -> Description:
    """Read the description of a classifier.

    Args:
        kind: its class; that of a task may have more fields.

    Raises:
        DataError: the folder contains none, or its file is damaged.
    """
    if not is_classifier(folder):
        raise DataError(
            f"{folder} holds no {DESCRIPTION_FILE}: it is no classifier", "train one: `anabatic classify train`"
        )
    fields = weight_files.read_json_object(folder / DESCRIPTION_FILE)
    try:
        lists: dict[str, Any] = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return kind(**{**fields, **lists})
    except (TypeError, KeyError) as error:
        raise DataError(f"{folder / DESCRIPTION_FILE} is incomplete: {error}", "copy the folder again") from error


def load_head_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load the head's weights into a model with a head.

    Raises:
        DataError: the file is missing or damaged, or of another head.
    """
    try:
        tensors = load_file(folder / HEAD_WEIGHTS_FILE)
    except Exception as error:  # safetensors raises its own class, straight from Rust
        raise DataError(f"{folder / HEAD_WEIGHTS_FILE} cannot be read: {error}", "copy the folder again") from error
    state = get_class_head(model).state_dict()
    mismatched = sorted(name for name in state if name not in tensors or tensors[name].shape != state[name].shape)
    if mismatched or tensors.keys() - state.keys():
        raise DataError(
            f"{folder / HEAD_WEIGHTS_FILE} has another head: {', '.join(mismatched[:3])}", "copy the folder again"
        )
    for name, value in state.items():
        copy_from_full(value, tensors[name])


def load_classifier(
    path: str | Path, device: torch.device, kind: type[Description]
) -> tuple[PreTrainedModel, Description]:
    """Load a classifier onto `device` for inference.

    Raises:
        DataError: the folder or a file in it is missing, damaged, or contains no classifier.
    """
    folder = pretrained.resolve_model_folder(path)
    description = read_description(folder, kind)
    model = pretrained.load_model(folder, device)
    attach_class_head(model, description)
    get_class_head(model).to_empty(device=device)
    load_head_weights(model, folder)
    model.train(False)
    return model, description
