"""Adapters of stacked experts, and their layout in PEFT's files.

PEFT 0.21 (`peft/tuners/lora/layer.py`, `ParamWrapper`) adapts parameters named in `target_parameters`. For a weight of
`E` experts it stores `lora_A.weight` `[E r, in]`, expert by expert, and `lora_B.weight` `[out, r E]`, rank by rank. The
wrappers of a module's weights are nested in the order of the weights: the last has the module's name, the others
`.base_layer` after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabatic.core.errors import ConfigError
from anabatic.parallel.sharded_tensors import copy_from_full, gather_full_tensor, to_local

EXPERT_WEIGHT_NAMES = ("gate_up_proj", "down_proj")
"""Names of the stacked weights, in the order of the parameters; an adapter is the module `NAME_adapter` beside it."""
ADAPTER_SUFFIX = "_adapter"
_WRAPPED = ".base_layer"


class ExpertAdapter(nn.Module):
    """Low-rank adapters of one stacked weight: expert e adds `s (x A_e^T) B_e^T`, with A `[E, r, in]`, B `[E, out, r]`.

    Each is two grouped products; the sum `W + s B A`, which PEFT makes, is as large as all experts together.
    """

    def __init__(self, weight: Tensor, is_transposed: bool, rank: int, scale: float) -> None:
        super().__init__()
        experts, *sizes = weight.shape
        self.in_features, self.out_features = sizes if is_transposed else reversed(sizes)
        self.is_transposed, self.scale = is_transposed, scale
        options: dict[str, Any] = {"device": weight.device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.empty(experts, rank, self.in_features, **options))
        self.lora_B = nn.Parameter(torch.zeros(experts, self.out_features, rank, **options))

    @torch.no_grad()
    def init_adapter(self, generator: torch.Generator) -> None:
        """Draw A as PEFT does, like a linear layer's (`LoraLinear.init_adapter`); B is zero."""
        bound = 1 / math.sqrt(self.in_features)
        copy_from_full(self.lora_A, torch.empty(self.lora_A.shape).uniform_(-bound, bound, generator=generator))
        to_local(self.lora_B).zero_()

    def export_tensors(self) -> tuple[Tensor, Tensor]:
        """Return whole A `[E r, in]` and B `[out, r E]` in PEFT's layout; all ranks call it."""
        a, b = gather_full_tensor(self.lora_A), gather_full_tensor(self.lora_B)
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)

    @torch.no_grad()
    def import_tensor(self, kind: str, value: Tensor) -> bool:
        """Copy `lora_A` or `lora_B` in PEFT's layout into this adapter, each rank its part; return whether it fits."""
        experts, rank = self.lora_A.shape[:2]
        if kind == "lora_A" and value.shape == (experts * rank, self.in_features):
            copy_from_full(self.lora_A, value.unflatten(0, (experts, rank)))
        elif kind == "lora_B" and value.shape == (self.out_features, rank * experts):
            copy_from_full(self.lora_B, value.unflatten(1, (rank, experts)).permute(2, 0, 1))
        else:
            return False
        return True


def compute_expert_delta(a: Tensor, b: Tensor, experts: int, is_transposed: bool) -> Tensor:
    """Return `B A` of every expert in the layout of its stacked weight, from the tensors of PEFT's files."""
    product = b.unflatten(1, (-1, experts)).permute(2, 0, 1) @ a.unflatten(0, (experts, -1))
    return product.transpose(1, 2) if is_transposed else product


def make_peft_names(weights: Sequence[str]) -> dict[str, str]:
    """Return the names of PEFT's wrappers of adapted stacked weights, wrapper -> weight."""
    wrappers: dict[str, str] = {}
    for owner in dict.fromkeys(weight.rpartition(".")[0] for weight in weights):
        adapted = [f"{owner}.{name}" for name in EXPERT_WEIGHT_NAMES if f"{owner}.{name}" in weights]
        wrappers |= {f"{owner}{_WRAPPED * depth}": weight for depth, weight in enumerate(reversed(adapted))}
    return wrappers


def format_target_parameters(adapted: Sequence[str], present: Sequence[str]) -> list[str]:
    """Return `target_parameters` for adapter_config.json: names from the expert layer on, or full names if not every
    weight of that name is adapted."""
    ends = sorted({".".join(name.split(".")[-2:]) for name in adapted})
    matching = {name for name in present if any(name.endswith(f".{end}") for end in ends)}
    return ends if matching == set(adapted) else sorted(adapted)


def require_plain_adapter(settings: Mapping[str, Any]) -> None:
    """Check that the settings of an adapter with experts are those that PEFT's wrapper of parameters has.

    Raises:
        ConfigError: they are not.
    """
    for name, value in settings.items():
        if value:
            raise ConfigError(
                f"lora.{name} is {value}, and experts have an adapter, for which PEFT knows no such thing",
                f"leave lora.{name} out, or take the experts out of lora.target_modules",
            )
