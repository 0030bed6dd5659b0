"""New weights for a model that answers, from a folder: all are read and checked before one of them is replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.models.lora.multi_adapter import MultiAdapterLinear
from anabatic.models.pretrained import load_model, read_config

_OTHER_KEYS = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "text_config"}
)
"""Of a config.json, which may differ between folders of one model. Numbers of special tokens may, too."""


def resolve_below(root: Path, given: str) -> Path:
    """Return the real folder of a path, which lies below `root`, as all its files do.

    Raises:
        DataError: it is missing or no folder, or it or a file of it lies elsewhere, by a link or otherwise.
    """
    top = root.resolve()
    try:
        folder = (top / given).resolve(strict=True)
        outside = next((one for one in (folder, *folder.iterdir()) if not one.resolve().is_relative_to(top)), None)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL; RuntimeError: links in a circle
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{given[:300]!r} cannot be read: {reason}", f"write a folder below {root}") from error
    if outside is not None:
        raise DataError(f"{given[:300]!r} is not below {root}", "start the server with --weights-folder FOLDER")
    return folder


@torch.no_grad()
def read_staged_weights(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder in host memory, once they fit the model in name, shape and configuration.

    Raises:
        DataError: they do not, a file is torn, or a value is not finite.
    """
    config = read_config(folder)
    if differing := _find_difference(_flatten_config(model.config), _flatten_config(config)):
        key, ours, theirs = differing
        what = f"{folder}: another model: config.json says {key} {theirs}, and the model that is served has {ours}"
        raise DataError(what, "serve the folder of --model")
    staged = dict(_iter_weights(load_model(folder, torch.device("cpu"), model.dtype)))
    served = dict(_iter_weights(model))
    wrong = next((name for name in served if name not in staged or staged[name].shape != served[name].shape), None)
    if wrong is not None or len(staged) != len(served):
        raise DataError(f"{folder}: {wrong or 'a weight'} is not as in the model that is served", "save it again")
    broken = next((name for name, value in staged.items() if not value.isfinite().all()), None)
    if broken is not None:
        raise DataError(f"{folder}: {broken} holds values that are not finite", "train from an earlier checkpoint")
    return staged


@torch.no_grad()
def replace_weights(model: PreTrainedModel, staged: Mapping[str, Tensor]) -> None:
    """Copy weights into the model, whose memory stays where it is."""
    for name, value in _iter_weights(model):
        value.copy_(staged[name])


def compute_checksums(model: PreTrainedModel) -> dict[str, str]:
    """Return name -> dtype and SHA-256 of every weight."""
    return {name: describe_tensor(value, value.dtype) for name, value in _iter_weights(model)}


def describe_tensor(value: Tensor, dtype: torch.dtype) -> str:
    """Return `float32:` and the SHA-256 of a tensor's bytes in a dtype."""
    stored = value.detach().to(dtype).cpu().contiguous().flatten().view(torch.uint8)
    return f"{str(dtype).removeprefix('torch.')}:{hashlib.sha256(stored.numpy().data).hexdigest()}"


def _iter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by the names that they have without adapters."""
    wrapped = {name for name, module in model.named_modules() if isinstance(module, MultiAdapterLinear)}
    for name, value in model.state_dict().items():
        owner, _, last = name.rpartition(".base.")
        yield (f"{owner}.{last}" if owner in wrapped else name), value


def _flatten_config(config: Any) -> dict[str, Any]:
    told = {**config.to_dict(), **config.get_text_config().to_dict()}
    return {key: value for key, value in told.items() if key not in _OTHER_KEYS and not key.endswith("_token_id")}


def _find_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            return key, ours.get(key), theirs.get(key)
    return None
