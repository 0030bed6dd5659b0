"""Adapters that become part of a model's weights while it is loaded, one after the other.

Several plain adapters add up: `W + sum of w s B A`, which is PEFT's `add_weighted_adapter(combination_type="cat")`.
With DoRA the order counts, since it scales the rows of what lies below; the order is that of the list, as in PEFT's
`merge_adapter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError, DataError
from anabatic.models.lora import adapter, adapter_config
from anabatic.parallel.dtensors import copy_from_full, gather_full_tensor

RECORD_KEY = "merged_adapters"
"""Key of adapter_config.json, ours: what must be merged into the base model before this adapter fits."""


@dataclass(frozen=True)
class WeightedAdapter:
    """An adapter, and how much of it counts."""

    folder: Path
    weight: float = 1.0

    def __str__(self) -> str:
        return str(self.folder) if self.weight == 1.0 else f"{self.folder}@{self.weight:g}"


def read_merged_record(folder: Path) -> list[WeightedAdapter]:
    """Return what an adapter was trained on top of.

    Raises:
        DataError: the record is damaged.
    """
    entries = adapter_config.read_adapter_config(folder).get(RECORD_KEY) or []
    try:
        return [WeightedAdapter(Path(entry["path"]), float(entry["weight"])) for entry in entries]
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{folder / adapter_config.ADAPTER_CONFIG_FILE}: {RECORD_KEY} is damaged: {entries}",
            "copy the folder again",
        ) from error


def make_merged_record(shares: Sequence[WeightedAdapter]) -> dict[str, Any]:
    """Return what adapter_config.json says of the adapters below; nothing when there are none."""
    entries = [{"path": str(share.folder.resolve()), "weight": share.weight} for share in shares]
    return {RECORD_KEY: entries} if entries else {}


@torch.no_grad()
def merge_adapters(model: PreTrainedModel, shares: Sequence[WeightedAdapter]) -> int:
    """Add adapters to the weights of a model that is loaded; return how many weights changed.

    All ranks call it. Every weight is summed in fp32 and rounded once.

    Raises:
        ConfigError: a weight other than 1 for an adapter that does not add up.
        DataError: an adapter is damaged, or made for another model.
    """
    parts = [_LoadedAdapter(share) for share in shares]
    own = dict(model.named_parameters(remove_duplicate=False))
    _require_one_owner(parts)
    changed = [name for name in own if any(part.has_weight(name) for part in parts)]
    for part in parts:
        part.require_fit(own)
    for name in changed:
        total = gather_full_tensor(own[name]).float()
        for part in parts:
            total = part.add_to_weight(name, total)
        copy_from_full(own[name], total.to(own[name].dtype))
    return len(changed)


class _LoadedAdapter:
    """One adapter in memory, by the names of the weights that it changes."""

    def __init__(self, share: WeightedAdapter) -> None:
        self.adapter = share
        self.lora = adapter_config.parse_lora_settings(adapter_config.read_adapter_config(share.folder), share.folder)
        self.scale = adapter.compute_scale(self.lora) * share.weight
        self.tensors_by_weight: dict[str, dict[str, Tensor]] = {}
        for name, tensor in adapter.read_adapter_weights(share.folder).items():
            weight, piece = _split_tensor_name(adapter.convert_peft_name(name))
            self.tensors_by_weight.setdefault(weight, {})[piece] = tensor
        exact = [name for name, found in self.tensors_by_weight.items() if "whole" in found or "magnitude" in found]
        if exact and share.weight != 1.0:
            what = "DoRA" if self.lora.use_dora else "modules that were trained whole"
            raise ConfigError(f"adapter {share}: an adapter with {what} has no part", "leave the weight out")

    def has_weight(self, name: str) -> bool:
        return name in self.tensors_by_weight

    def require_fit(self, own: dict[str, torch.nn.Parameter]) -> None:
        """Every piece needs a weight of its shape."""
        for name, found in self.tensors_by_weight.items():
            if name not in own:
                raise self._wrong_model_error(f"{name} is not there")
            shape = list(found["whole"].shape) if "whole" in found else self._expected_shape(name, found)
            if shape != list(own[name].shape):
                raise self._wrong_model_error(f"{name} has shape {list(own[name].shape)}, the adapter is for {shape}")

    def _expected_shape(self, name: str, found: dict[str, Tensor]) -> list[int]:
        lacking = [piece for piece in ("lora_A", "lora_B") if piece not in found]
        if lacking:
            raise DataError(f"{self.adapter.folder}: {lacking[0]} of {name} is missing", "copy the folder again")
        return [found["lora_B"].shape[0], found["lora_A"].shape[1]]

    def _wrong_model_error(self, what: str) -> DataError:
        return DataError(
            f"{self.adapter.folder}: made for another model: {what}",
            "use the model that adapter_config.json names as base_model_name_or_path",
        )

    def add_to_weight(self, name: str, total: Tensor) -> Tensor:
        """Return `total`, fp32, with this adapter in it."""
        found = {
            piece: tensor.to(total.device, torch.float32)
            for piece, tensor in self.tensors_by_weight.get(name, {}).items()
        }
        if "whole" in found:
            return found["whole"]
        if found:
            total = torch.addmm(total, found["lora_B"], found["lora_A"], alpha=self.scale)
        if "magnitude" in found:  # DoRA, arXiv 2402.09353, equation 5
            total = total * (found["magnitude"] / torch.linalg.vector_norm(total, dim=1))[:, None]
        return total


def _split_tensor_name(name: str) -> tuple[str, str]:
    """`model.q_proj.lora_A` -> the weight `model.q_proj.weight` and `lora_A`."""
    owner, _, last = name.rpartition(".")
    if last in ("lora_A", "lora_B"):
        return f"{owner}.weight", last
    return (f"{owner}.weight", "magnitude") if last == "lora_magnitude" else (name, "whole")


def _require_one_owner(parts: Sequence[_LoadedAdapter]) -> None:
    """What was trained whole replaces a weight: of two that do, or of one and a change below it, one would be lost."""
    for number, part in enumerate(parts):
        for name, found in part.tensors_by_weight.items():
            before = next((each for each in parts[:number] if each.has_weight(name)), None)
            if "whole" in found and before is not None:
                raise ConfigError(
                    f"adapter {part.adapter.folder} replaces {name}, which {before.adapter.folder} changed",
                    "the two cannot be joined: leave one out",
                )
