"""Several adapters on one model: each token is computed with the adapter that its request asks, the weights are
shared and stay as they are.

Rows of a forward pass lie in the order of their adapters (`kv_cache.ForwardPlan`), so an adapter's tokens are a few
slices, and each costs two small products per layer (the idea of S-LoRA, arXiv 2311.03285).
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

AdapterSlice = tuple[int, int, int]
"""Place of an adapter, first token, end."""


class MultiAdapterLinear(nn.Module):
    """A linear layer, and what adapters add to it.

    Attributes:
        base: the layer.
        pairs: for each adapter `A^T [in, r]` and `scale * B^T [r, out]`, or None where it leaves this layer alone.
    """

    def __init__(self, base: nn.Module, slices: list[AdapterSlice]) -> None:
        super().__init__()
        self.base, self._slices = base, slices
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def weight(self) -> Tensor:
        """The layer's own: for those who ask for its type."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The layer's own."""
        bias: Tensor | None = self.base.bias  # type: ignore[assignment]
        return bias

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        out: Tensor = self.base(input)
        if self._slices:
            flat, rows = input.flatten(0, -2), out.flatten(0, -2)  # views: both are contiguous
            for place, start, end in self._slices:
                if place in self.pairs:
                    down, up = self.pairs[place]
                    rows[start:end].addmm_(flat[start:end].to(down.dtype) @ down, up)
        return out


class AdapterRegistry:
    """The adapters of one model that requests may ask by name."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._slices: list[AdapterSlice] = model.__dict__.setdefault("_anabatic_slices", [])
        self._layers: dict[str, MultiAdapterLinear] = {}
        self._slots: dict[str, tuple[int, bytes]] = {}
        # Several engines may share a model: a place is never given twice.
        self._used_slots: list[int] = model.__dict__.setdefault("_anabatic_places", [])

    @property
    def adapter_names(self) -> Sequence[str]:
        """Names of those that are loaded."""
        return list(self._slots)

    def get_slot(self, name: str | None) -> int:
        """Return the place of an adapter; -1: the model itself."""
        return -1 if name is None else self._slots[name][0]

    def get_cache_salt(self, name: str | None) -> bytes:
        """Return what tells the blocks of an adapter's requests from others', also from those of an adapter that had
        the same name.

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

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            DataError: there is none of that name.
        """
        self.get_cache_salt(name)
        place, _ = self._slots.pop(name)
        for layer in self._layers.values():
            layer.pairs.pop(place, None)

    @torch.no_grad()
    def add_adapter(self, name: str, folder: Path) -> None:
        """Read an adapter.

        Raises:
            DataError: the name is taken, or the folder is damaged, of another model, or of a kind that must be merged.
        """
        if name in self._slots:
            raise DataError(f'there is an adapter "{name}" already', "choose another name, or drop it first")
        pairs = self._read_pairs(folder)
        place = len(self._used_slots)
        self._used_slots.append(place)
        for target, (down, up) in pairs.items():
            self._wrap_layer(target).pairs[place] = (down, up)
        self._slots[name] = (place, os.urandom(16))

    def _read_pairs(self, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
        """Layer -> its two matrices as `MultiAdapterLinear` wants them; everything is checked before anything is
        changed."""
        lora = adapter_config.parse_lora_settings(adapter_config.read_adapter_config(folder), folder)
        if lora.use_dora or lora.modules_to_save:
            what = "DoRA" if lora.use_dora else f"modules trained whole ({', '.join(lora.modules_to_save)})"
            raise DataError(f"{folder} has {what}, which changes the weights", "merge it: anabatic merge -m FOLDER")
        adapter_config.require_adapter_weights(folder)
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in adapter.read_adapter_weights(folder).items():
            layer, _, part = adapter.convert_peft_name(name).rpartition(".")
            found.setdefault(layer, {})[part] = tensor
        scale = adapter.compute_scale(lora)
        return {name: self._make_pair(folder, name, parts, scale) for name, parts in found.items()}

    def _make_pair(self, folder: Path, name: str, parts: dict[str, Tensor], scale: float) -> tuple[Tensor, Tensor]:
        base = self._find_layer(name)
        size = None if base is None else (int(base.in_features), int(base.out_features))  # type: ignore[arg-type]
        a, b = parts.get("lora_A"), parts.get("lora_B")
        if size is None or a is None or b is None or (a.shape[1], b.shape[0]) != size or a.shape[0] != b.shape[1]:
            there = "not there" if size is None else f"{size[1]} x {size[0]}"
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in parts.items())
            raise DataError(
                f"{folder}: made for another model: {name} has {shapes}; in this model the layer is {there}",
                "use the model that adapter_config.json names as base_model_name_or_path",
            )
        like: dict[str, Any] = {"device": self._model.device, "dtype": self._model.dtype}
        return a.t().to(**like).contiguous(), (b.t().float() * scale).to(**like).contiguous()

    def _find_layer(self, name: str) -> nn.Module | None:
        """The layer an adapter names, as it was before adapters."""
        try:
            module = self._model.get_submodule(name)
        except AttributeError:
            return None
        module = module.base if isinstance(module, MultiAdapterLinear) else module  # type: ignore[assignment]
        return module if hasattr(module, "in_features") else None

    def _wrap_layer(self, name: str) -> MultiAdapterLinear:
        """Put the layer that adds what adapters add in place of a layer, once."""
        module = self._model.get_submodule(name)
        if not isinstance(module, MultiAdapterLinear):
            parent, _, last = name.rpartition(".")
            module = MultiAdapterLinear(module, self._slices)
            setattr(self._model.get_submodule(parent), last, module)
        self._layers[name] = module
        return module


def select_adapters(model: PreTrainedModel, adapters: Sequence[tuple[int, int]]) -> None:
    """Say which adapter the tokens of the next forward pass ask.

    Args:
        adapters: `(place, tokens)`, in the order of the tokens.
    """
    slices: list[AdapterSlice] | None = model.__dict__.get("_anabatic_slices")
    if slices is None:
        return
    slices.clear()
    at = 0
    for place, tokens in adapters:
        if slices and slices[-1][0] == place and slices[-1][2] == at:
            slices[-1] = (place, slices[-1][1], at + tokens)
        elif place >= 0:
            slices.append((place, at, at + tokens))
        at += tokens
