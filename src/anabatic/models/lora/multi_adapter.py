"""Several adapters on one model: each token uses the adapter of its request; the base weights are shared and unchanged.

Rows of a forward pass are sorted by adapter (`kv_cache.ForwardPlan`), so an adapter's tokens are a few slices, each of
which costs two small products per layer (as in S-LoRA, arXiv 2311.03285).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean
from anabatic.models.lora import adapter, adapter_config
from anabatic.plan.layer_names import is_expert_target

AdapterSlice = tuple[int, int, int]
"""Slot of an adapter, first token, end."""


class MultiAdapterLinear(nn.Module):
    """A linear layer with several adapters.

    Attributes:
        base: the layer.
        pairs: slot -> `A^T [in, r]` and `scale * B^T [r, out]`, for the adapters of this layer.
    """

    def __init__(self, base: nn.Module, slices: list[AdapterSlice]) -> None:
        super().__init__()
        self.base, self._slices = base, slices
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def weight(self) -> Tensor:
        """Return the weight of the base layer, for code that reads its dtype."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Return the bias of the base layer."""
        bias: Tensor | None = self.base.bias  # type: ignore[assignment]
        return bias

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        out: Tensor = self.base(input)
        if self._slices:
            self.add_adapters(input.flatten(0, -2), out.flatten(0, -2))  # views: both are contiguous
        return out

    def add_adapters(self, x: Tensor, out: Tensor) -> None:
        """Add what the adapters of the tokens give; x: `[T, in]`, out: `[T, out]`, changed in place."""
        for slot, start, end in self._slices:
            if slot in self.pairs:
                down, up = self.pairs[slot]
                out[start:end].addmm_(x[start:end].to(down.dtype) @ down, up)


class AdapterRegistry:
    """The adapters of one model, by name."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._slices: list[AdapterSlice] = model.__dict__.setdefault("_anabatic_slices", [])
        self._layers: dict[str, MultiAdapterLinear] = {}
        self._slots: dict[str, tuple[int, bytes]] = {}
        # Several engines may share a model: a slot is never reused.
        self._used_slots: list[int] = model.__dict__.setdefault("_anabatic_places", [])

    @property
    def adapter_names(self) -> Sequence[str]:
        """Return the names of the loaded adapters."""
        return list(self._slots)

    def get_slot(self, name: str | None) -> int:
        """Return the slot of an adapter; -1: the base model."""
        return -1 if name is None else self._slots[name][0]

    def get_cache_salt(self, name: str | None) -> bytes:
        """Return the salt that separates an adapter's cache blocks from others.

        Raises:
            DataError: there is no such adapter.
        """
        if name is None:
            return b""
        if name not in self._slots:
            raise DataError(
                f'there is no adapter "{name}".{did_you_mean(name, self._slots)}',
                f"adapters: {', '.join(self._slots) or 'none are loaded'}",
            )
        return self._slots[name][1]

    @torch.no_grad()
    def add_adapter(self, name: str, folder: Path, replaces: bool = False) -> bool:
        """Load an adapter; return True if layers of the model were replaced by such with adapters.

        Args:
            replaces: an adapter of this name is removed once the new one is read.

        Raises:
            DataError: the name is taken, or the folder is damaged, of another model, or of a type that must be merged.
        """
        if name in self._slots and not replaces:
            raise DataError(f'there is an adapter "{name}" already', "choose another name")
        pairs = self._read_pairs(folder)
        if name in self._slots:
            self.remove_adapter(name)
        slot, wrapped = len(self._used_slots), len(self._layers)
        self._used_slots.append(slot)
        for target, (down, up) in pairs.items():
            self._wrap_layer(target).pairs[slot] = (down, up)
        self._slots[name] = (slot, os.urandom(16))
        return len(self._layers) > wrapped

    def remove_adapter(self, name: str) -> None:
        """Free an adapter's weights; its slot stays empty."""
        slot, _ = self._slots.pop(name)
        for layer in self._layers.values():
            layer.pairs.pop(slot, None)

    def _read_pairs(self, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
        """Return layer -> its pair of matrices for `MultiAdapterLinear`; all checks run before any change."""
        lora = adapter_config.parse_lora_settings(adapter_config.read_adapter_config(folder), folder)
        if lora.use_dora or lora.modules_to_save:
            contents = "DoRA" if lora.use_dora else f"modules trained whole ({', '.join(lora.modules_to_save)})"
            raise DataError(f"{folder} has {contents}, which changes the weights", "merge it: anabatic merge -m FOLDER")
        if any(map(is_expert_target, lora.target_modules)):
            raise DataError(
                f"{folder} adapts experts, which no request can choose", "merge it: anabatic merge -m FOLDER"
            )
        adapter_config.require_adapter_weights(folder)
        tensors_by_layer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in adapter.read_adapter_weights(folder).items():
            layer, _, kind = adapter.convert_peft_name(name).rpartition(".")
            tensors_by_layer.setdefault(layer, {})[kind] = tensor
        scale = adapter.compute_scale(lora)
        return {name: self._make_pair(folder, name, parts, scale) for name, parts in tensors_by_layer.items()}

    def _make_pair(self, folder: Path, name: str, parts: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
        base = self._find_layer(name)
        size = None if base is None else (int(base.in_features), int(base.out_features))  # type: ignore[arg-type]
        a, b = parts.get("lora_A"), parts.get("lora_B")
        if size is None or a is None or b is None or (a.shape[1], b.shape[0]) != size or a.shape[0] != b.shape[1]:
            expected = "not there" if size is None else f"{size[1]} x {size[0]}"
            shapes = ", ".join(f"{kind} {list(tensor.shape)}" for kind, tensor in parts.items())
            raise DataError(
                f"{folder}: made for another model: {name} has {shapes}; in this model the layer is {expected}",
                "use the model that adapter_config.json names as base_model_name_or_path",
            )
        if not (a.isfinite().all() and b.isfinite().all()):
            raise DataError(f"{folder}: {name} holds values that are not finite", "train from an earlier checkpoint")
        options: dict[str, Any] = {"device": self._model.device, "dtype": self._model.dtype}
        return a.t().to(**options).contiguous(), (b.t().float() * scale).to(**options).contiguous()

    def _find_layer(self, name: str) -> nn.Module | None:
        """Return the original linear layer of a name; None if there is none."""
        try:
            module = self._model.get_submodule(name)
        except AttributeError:
            return None
        module = module.base if isinstance(module, MultiAdapterLinear) else module  # type: ignore[assignment]
        return module if hasattr(module, "in_features") else None

    def _wrap_layer(self, name: str) -> MultiAdapterLinear:
        """Return the `MultiAdapterLinear` of a layer, which replaces the layer on first use."""
        module = self._model.get_submodule(name)
        if not isinstance(module, MultiAdapterLinear):
            parent, _, last = name.rpartition(".")
            module = MultiAdapterLinear(module, self._slices)
            setattr(self._model.get_submodule(parent), last, module)
        self._layers[name] = module
        return module


def select_adapters(model: PreTrainedModel, adapters: Sequence[tuple[int, int]]) -> None:
    """Set the adapters of the tokens of the next forward pass.

    Args:
        adapters: `(slot, tokens)`, in token order.
    """
    slices: list[AdapterSlice] | None = model.__dict__.get("_anabatic_slices")
    if slices is None:
        return
    slices.clear()
    start = 0
    for slot, tokens in adapters:
        if slices and slices[-1][0] == slot and slices[-1][2] == start:
            slices[-1] = (slot, slices[-1][1], start + tokens)
        elif slot >= 0:
            slices.append((slot, start, start + tokens))
        start += tokens
