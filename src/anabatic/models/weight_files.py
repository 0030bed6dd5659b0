"""Read tensors from the weight files of a Hugging Face folder."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.models.quantized import QuantizationKind
from anabatic.parallel.sharded_tensors import TensorSlices

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        DataError: it is missing, damaged, or not an object.
    """
    try:
        content = json_reader.read_json_file(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "copy the folder again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {type(content).__name__}, not an object", "copy the folder again")
    return content


class WeightsReader:
    """Reads tensors from open weight files.

    Attributes:
        names: names of all stored tensors.
    """

    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        self.folder = folder
        self._file_of = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 - no mapping
        self.names = sorted(self._file_of)

    def get_shape(self, name: str) -> list[int]:
        """Return a tensor's shape."""
        return list(self._file_of[name].get_slice(name).get_shape())

    def get_dtype(self, name: str) -> str:
        """Return the number format of a stored tensor in safetensors' words, such as `BF16`."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def read_codes(self, name: str, kind: QuantizationKind) -> tuple[Tensor, Tensor] | None:
        """Return the codes and scales of a weight that is stored as `kind` holds it; None: it is not."""
        return None

    def read_tensor(self, name: str, slices: TensorSlices | None = None) -> Tensor:
        """Read a tensor, or slices of it, from the disk."""
        stored = self._file_of[name].get_slice(name)
        value: Tensor = stored[slices] if slices else stored[...]
        return value


@functools.cache
def _safe_open_options() -> dict[str, str]:
    """Return options to read files instead of mapping them: mapped pages count as memory of every rank. Needs a newer
    safetensors."""
    return {"backend": "pread"} if "backend" in inspect.signature(safe_open).parameters else {}


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightsReader]:
    """Open the weight files of a model folder.

    Raises:
        DataError: a file is missing or torn.
    """
    names = [SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        names = _list_index_files(folder / INDEX_FILE)
    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:3])}",
            "copy the folder again; only safetensors are read",
        )
    with ExitStack() as stack:
        files = {}
        for name in names:
            try:
                files[name] = stack.enter_context(safe_open(str(folder / name), framework="pt", **_safe_open_options()))
            except Exception as error:  # safetensors raises its own class, straight from Rust
                raise DataError(f"{folder / name} is incomplete: {error}", "copy it again") from error
        yield WeightsReader(folder, files)


def _list_index_files(index: Path) -> list[str]:
    weight_map = read_json_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and name and "/" not in name for name in names):
        raise DataError(f"{index} lists no weight files", "copy the folder again")
    return sorted(set(names))


def require_weight_files(folder: Path) -> None:
    """Check that the weight files of a folder exist and match their headers.

    Raises:
        DataError: one is missing or truncated.
    """
    with open_weights(folder):
        pass


def read_quantization(folder: Path) -> Mapping[str, Any] | None:
    """Return how the weights of a folder are quantized, as its config.json says, or None.

    Raises:
        DataError: config.json is damaged.
    """
    config = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    text_config = config.get("text_config")
    inner = text_config.get("quantization_config") if isinstance(text_config, dict) else None
    settings = config.get("quantization_config") or inner
    if settings is not None and not isinstance(settings, dict):
        raise DataError(
            f"{folder / 'config.json'}: quantization_config is {type(settings).__name__}, not an object",
            "copy the folder again",
        )
    return settings
