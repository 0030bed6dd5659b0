"""Merge adapters into a model's weights while it is loaded, one after the other.

Plain adapters are summed: `W + sum of w s B A`, as in PEFT's `add_weighted_adapter(combination_type="cat")`. With DoRA
the order matters, since it scales the rows of the weight below; the order is that of the list, as in PEFT's
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
from anabatic.models.lora import adapter, adapter_config, expert_adapter
from anabatic.parallel.sharded_tensors import copy_from_full, gather_full_tensor

RECORD_KEY = "merged_adapters"
"""Our key of adapter_config.json: adapters that must be merged into the base model before this one."""


@dataclass(frozen=True)
class WeightedAdapter:
    """An adapter and its weight."""

    folder: Path
    weight: float = 1.0

    def __str__(self) -> str:
        return str(self.folder) if self.weight == 1.0 else f"{self.folder}@{self.weight:g}"


def read_merged_record(folder: Path) -> list[WeightedAdapter]:
    """Return the adapters that an adapter was trained on top of.

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


def make_merged_record(adapters: Sequence[WeightedAdapter]) -> dict[str, Any]:
    """Return the entry of adapter_config.json for the adapters below; empty if there are none."""
    entries = [{"path": str(weighted.folder.resolve()), "weight": weighted.weight} for weighted in adapters]
    return {RECORD_KEY: entries} if entries else {}


@torch.no_grad()
def merge_adapters(model: PreTrainedModel, adapters: Sequence[WeightedAdapter]) -> int:
    """Merge adapters into the weights of a loaded model; return how many weights changed.

    All ranks call it. Every weight is summed in fp32 and rounded once.

    Raises:
        ConfigError: a weight other than 1 for an adapter that is not a sum.
        DataError: an adapter is damaged, or made for another model.
    """
    loaded_adapters = [_LoadedAdapter(weighted, model) for weighted in adapters]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _require_one_owner(loaded_adapters)
    changed = [name for name in parameters if any(loaded.has_weight(name) for loaded in loaded_adapters)]
    for loaded in loaded_adapters:
        loaded.require_fit(parameters)
    for name in changed:
        total = gather_full_tensor(parameters[name]).float()
        for loaded in loaded_adapters:
            total = loaded.add_to_weight(name, total)
        copy_from_full(parameters[name], total.to(parameters[name].dtype))
    return len(changed)


class _LoadedAdapter:
    """One adapter in memory, by the names of the weights it changes."""

    def __init__(self, weighted: WeightedAdapter, model: PreTrainedModel) -> None:
        self.adapter = weighted
        self.lora = adapter_config.parse_lora_settings(
            adapter_config.read_adapter_config(weighted.folder), weighted.folder
        )
        self.scale = adapter.compute_scale(self.lora) * weighted.weight
        self.tensors_by_weight: dict[str, dict[str, Tensor]] = {}
        self.experts = adapter.find_saved_experts(model, self.lora)
        for name, tensor in adapter.read_adapter_weights(weighted.folder).items():
            owner, _, kind = (converted := adapter.convert_peft_name(name)).rpartition(".")
            weight, kind = (self.experts[owner], kind) if owner in self.experts else _split_tensor_name(converted)
            self.tensors_by_weight.setdefault(weight, {})[kind] = tensor
        self.transposed = {
            weight: bool(model.get_submodule(weight.rpartition(".")[0]).is_transposed)
            for weight in self.experts.values()
        }
        replaced = [
            name for name, tensors in self.tensors_by_weight.items() if "whole" in tensors or "magnitude" in tensors
        ]
        if replaced and weighted.weight != 1.0:
            contents = "DoRA" if self.lora.use_dora else "modules that were trained whole"
            raise ConfigError(f"adapter {weighted}: an adapter with {contents} has no part", "leave the weight out")

    def has_weight(self, name: str) -> bool:
        return name in self.tensors_by_weight

    def require_fit(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """Require a model weight of the right shape for every tensor."""
        for name, tensors in self.tensors_by_weight.items():
            if name not in parameters:
                raise self._wrong_model_error(f"{name} is not there")
            shape = list(tensors["whole"].shape) if "whole" in tensors else self._expected_shape(name, tensors)
            if name in self.transposed:
                experts = parameters[name].shape[0]
                sizes = reversed(shape) if self.transposed[name] else shape
                shape = [experts, *sizes] if len(tensors["lora_A"]) == experts * self.lora.r else shape
            if shape != list(parameters[name].shape):
                raise self._wrong_model_error(
                    f"{name} has shape {list(parameters[name].shape)}, the adapter is for {shape}"
                )

    def _expected_shape(self, name: str, tensors: dict[str, Tensor]) -> list[int]:
        missing = [kind for kind in ("lora_A", "lora_B") if kind not in tensors]
        if missing:
            raise DataError(f"{self.adapter.folder}: {missing[0]} of {name} is missing", "copy the folder again")
        return [tensors["lora_B"].shape[0], tensors["lora_A"].shape[1]]

    def _wrong_model_error(self, problem: str) -> DataError:
        return DataError(
            f"{self.adapter.folder}: made for another model: {problem}",
            "use the model that adapter_config.json names as base_model_name_or_path",
        )

    def add_to_weight(self, name: str, total: Tensor) -> Tensor:
        """Return the weight `total`, fp32, with this adapter merged."""
        tensors = {
            kind: tensor.to(total.device, torch.float32)
            for kind, tensor in self.tensors_by_weight.get(name, {}).items()
        }
        if "whole" in tensors:
            return tensors["whole"]
        if name in self.transposed:
            a, b = tensors["lora_A"], tensors["lora_B"]
            delta = expert_adapter.compute_expert_delta(a, b, total.shape[0], self.transposed[name])
            total = total + self.scale * delta
        elif tensors:
            total = torch.addmm(total, tensors["lora_B"], tensors["lora_A"], alpha=self.scale)
        if "magnitude" in tensors:  # DoRA, arXiv 2402.09353, equation 5
            total = total * (tensors["magnitude"] / torch.linalg.vector_norm(total, dim=1))[:, None]
        return total


def _split_tensor_name(name: str) -> tuple[str, str]:
    """Split `model.q_proj.lora_A` into the weight `model.q_proj.weight` and the kind `lora_A`."""
    owner, _, last = name.rpartition(".")
    if last in ("lora_A", "lora_B"):
        return f"{owner}.weight", last
    return (f"{owner}.weight", "magnitude") if last == "lora_magnitude" else (name, "whole")


def _require_one_owner(loaded_adapters: Sequence[_LoadedAdapter]) -> None:
    """Refuse a fully trained weight on top of another change of the same weight, which it would overwrite."""
    for index, loaded in enumerate(loaded_adapters):
        for name, tensors in loaded.tensors_by_weight.items():
            earlier = next((candidate for candidate in loaded_adapters[:index] if candidate.has_weight(name)), None)
            if "whole" in tensors and earlier is not None:
                raise ConfigError(
                    f"adapter {loaded.adapter.folder} replaces {name}, which {earlier.adapter.folder} changed",
                    "the two cannot be joined: leave one out",
                )
