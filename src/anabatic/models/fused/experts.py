"""Fused forward of expert layers in transformers 5, whose weights of all experts are one tensor.

`use_experts_implementation` (transformers.integrations.moe) sets attributes on every such module: whether weights are
transposed, have biases and a gate. The loop over experts in the class is the reference of the probe.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anabatic.device.experts import compute_expert_ends
from anabatic.device.ops import REFERENCE_OPS, DeviceOps

_EXPERTS, _SIZE, _INNER = 3, 8, 6


def is_expert_layer(module: nn.Module) -> bool:
    """True for a module of stacked, gated experts."""
    return getattr(module, "has_gate", False) is True and {"gate_up_proj", "down_proj"} <= set(module._parameters)


def make_expert_forward(ops: DeviceOps, silu: bool) -> Callable[..., Tensor]:
    """Return a forward with a device's operators; `silu`: the activation is SwiGLU over two halves."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows, positions = ops.permute(_cast_for_autocast(hidden_states), top_k_index)
        ends = compute_expert_ends(top_k_index, self.num_experts)
        row_experts = top_k_index.flatten().sort().values if self.has_bias else None
        gate_up = _grouped_product(self, "gate_up_proj", rows, ends, row_experts, ops)
        inner = ops.swiglu_joint(gate_up) if silu else self._apply_gate(gate_up)
        out = _grouped_product(self, "down_proj", inner, ends, row_experts, ops)
        return ops.unpermute(out, positions, top_k_weights.to(out.dtype)).to(hidden_states.dtype)

    return forward


def _grouped_product(
    module: Any, name: str, rows: Tensor, ends: Tensor, row_experts: Tensor | None, ops: DeviceOps
) -> Tensor:
    weight = getattr(module, name).to(rows.dtype)
    out = ops.grouped(rows, weight if module.is_transposed else weight.transpose(1, 2), ends)
    if row_experts is None:
        return out
    bias: Tensor = getattr(module, f"{name}_bias").to(rows.dtype)
    return out + bias.index_select(0, row_experts)


def _cast_for_autocast(x: Tensor) -> Tensor:
    """Cast as autocast does for matrix products: it does not cover grouped products."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


def choose_expert_forward(module: nn.Module, ops: DeviceOps) -> tuple[Callable[..., Tensor] | None, str, str]:
    """Return the fused forward if it matches on a small copy of the module, else None; the kind; the reason."""
    original = getattr(type(module).forward, "__wrapped__", None)
    name = type(module).__name__
    if original is None or module.__dict__.get("has_post_expert_norm"):
        return None, "expert layers", name
    probe, inputs = _make_probe(module)
    try:
        expected = original(probe, *inputs)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError):
        return None, "expert layers", name
    for silu in (True, False):
        out = make_expert_forward(REFERENCE_OPS, silu)(probe, *inputs)
        if torch.allclose(out, expected, rtol=1e-3, atol=1e-4):
            return make_expert_forward(ops, silu), "expert layers", ""
    return None, "expert layers", name


def _make_probe(module: Any) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
    """Return a copy with three small experts, and inputs of five tokens with two experts each."""
    generator = torch.Generator().manual_seed(0)

    def draw_tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shapes = {"gate_up_proj": (2 * _INNER, _SIZE), "down_proj": (_SIZE, _INNER)}
    weights = {}
    for name, shape in shapes.items():
        weights[name] = draw_tensor(_EXPERTS, *(reversed(shape) if module.is_transposed else shape))
        if module.has_bias:
            weights[f"{name}_bias"] = draw_tensor(_EXPERTS, shape[0])
    probe = copy.copy(module)
    probe.__dict__["_parameters"] = {name: nn.Parameter(weight) for name, weight in weights.items()}
    probe.__dict__["num_experts"] = _EXPERTS
    probe.__dict__.pop("forward", None)
    index = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 2], [0, 1]])
    return probe, (draw_tensor(5, _SIZE), index, draw_tensor(5, 2).softmax(-1))
