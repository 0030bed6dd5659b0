"""Layers of stacked experts (transformers 5) as grouped products, with adapters and with experts on other ranks.

A layer is matched by its structure, and a probe of its class's own loop over experts verifies the numbers. Shapes: `T`
tokens, `k` experts per token, `S = T k` rows, `E` experts.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anabatic.device.experts import compute_expert_ends
from anabatic.device.ops import REFERENCE_OPS, DeviceOps
from anabatic.models.lora.expert_adapter import ADAPTER_SUFFIX, EXPERT_WEIGHT_NAMES, ExpertAdapter
from anabatic.parallel.expert_exchange import combine_rows, dispatch_rows, plan_exchange
from anabatic.parallel.sharded_tensors import to_local
from anabatic.parallel.sharding import get_absent

_EXPERTS, _SIZE, _INNER = 3, 8, 6
"""Sizes of the probe."""
EXPERT_GROUP = "expert_group"
"""Attribute of a layer whose experts are divided among ranks: the ranks."""

ExpertForward = Callable[..., Tensor]


def is_expert_layer(module: nn.Module) -> bool:
    """True for a module of stacked, gated experts."""
    return getattr(module, "has_gate", False) is True and set(EXPERT_WEIGHT_NAMES) <= set(module._parameters)


def iter_expert_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of stacked experts by name."""
    return ((name, module) for name, module in model.named_modules() if is_expert_layer(module))


def iter_experts_of_all(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of stacked experts of all stages of a pipeline (`parallel/pipeline_parameters.py`)."""
    absent = get_absent(model)
    for name, module in model.named_modules():
        if is_expert_layer(module) or all(f"{name}.{own}" in absent for own in EXPERT_WEIGHT_NAMES):
            yield name, module


def insert_expert_adapter(module: Any, name: str, rank: int, scale: float) -> None:
    """Add an uninitialized adapter to the stacked weight `name` of a layer."""
    module.add_module(
        f"{name}{ADAPTER_SUFFIX}", ExpertAdapter(getattr(module, name), module.is_transposed, rank, scale)
    )
    if "forward" not in module.__dict__:
        keep_needed_forward(module)


@torch.no_grad()
def merge_expert_adapter(module: Any, name: str, adapter: ExpertAdapter) -> None:
    """Add an adapter to the stacked weight `name` of a layer, and remove it."""
    weight = getattr(module, name)
    delta = adapter.scale * (adapter.lora_B @ adapter.lora_A)
    weight.copy_(weight.float() + (delta.transpose(1, 2) if module.is_transposed else delta))
    del module._modules[f"{name}{ADAPTER_SUFFIX}"]


def list_expert_weights(model: nn.Module) -> list[str]:
    """Return the names of the stacked weights that can have adapters."""
    return [
        f"{name}.{weight}"
        for name, layer in iter_expert_layers(model)
        if choose_expert_forward(layer, REFERENCE_OPS)[0] is not None
        for weight in EXPERT_WEIGHT_NAMES
    ]


def keep_needed_forward(module: Any) -> None:
    """Give a layer with adapters, but without fused operators, the plain-torch forward: its class's has no adapters."""
    if not is_expert_layer(module) or not any(isinstance(child, ExpertAdapter) for child in module.children()):
        return
    forward, _, _ = choose_expert_forward(module, REFERENCE_OPS)
    assert forward is not None, "adapters are only added to layers whose forward is known"
    module.__dict__["forward"] = types.MethodType(forward, module)


def make_expert_forward(ops: DeviceOps, silu: bool) -> ExpertForward:
    """Return a forward with a device's operators; `silu`: the activation is SwiGLU over two halves."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows, positions = ops.permute(_cast_expert_input(hidden_states), top_k_index)
        ends = compute_expert_ends(top_k_index, self.num_experts)
        group = self.__dict__.get(EXPERT_GROUP)
        if group is None:
            out = _run_experts(self, rows, ends, ops, silu)
        else:
            plan = plan_exchange(ends, group)
            out = combine_rows(_run_experts(self, dispatch_rows(rows, plan), plan.ends, ops, silu), plan)
        return ops.unpermute(out, positions, top_k_weights.to(out.dtype)).to(hidden_states.dtype)

    return forward


def _run_experts(module: Any, rows: Tensor, ends: Tensor, ops: DeviceOps, silu: bool) -> Tensor:
    """Return the outputs of rows `[S, H]` sorted by expert; `ends` of each expert's rows."""
    row_experts = None
    if module.has_bias:
        row_experts = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
    gate_up = _grouped_product(module, "gate_up_proj", rows, ends, row_experts, ops)
    inner = ops.swiglu_joint(gate_up) if silu else module._apply_gate(gate_up)
    return _grouped_product(module, "down_proj", inner, ends, row_experts, ops)


def _grouped_product(
    module: Any, name: str, rows: Tensor, ends: Tensor, row_experts: Tensor | None, ops: DeviceOps
) -> Tensor:
    weight = to_local(getattr(module, name)).to(rows.dtype)
    out = ops.grouped(rows, weight if module.is_transposed else weight.transpose(1, 2), ends)
    adapter = module._modules.get(f"{name}{ADAPTER_SUFFIX}")
    if adapter is not None:
        a, b = (to_local(matrix).to(rows.dtype).transpose(1, 2) for matrix in (adapter.lora_A, adapter.lora_B))
        out = out.add(ops.grouped(ops.grouped(rows, a, ends), b, ends), alpha=adapter.scale)
    if row_experts is None:
        return out
    bias = to_local(getattr(module, f"{name}_bias")).to(rows.dtype)
    return out + bias.index_select(0, row_experts)


def _cast_expert_input(x: Tensor) -> Tensor:
    """Cast as autocast does for matrix products: it does not cover grouped products."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


@torch.no_grad()
def choose_expert_forward(module: nn.Module, ops: DeviceOps) -> tuple[ExpertForward | None, str, str]:
    """Return the fused forward if it matches on a small copy of the module, else None; the kind; the reason."""
    original = getattr(type(module).forward, "__wrapped__", None)
    name = type(module).__name__
    if original is None or module.__dict__.get("has_post_expert_norm"):
        return None, "expert layers", name
    with torch.device("cpu"):
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
    """Return a copy with three small experts and no adapters, and inputs of five tokens with two experts each."""
    generator = torch.Generator().manual_seed(0)

    def draw_tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shapes = {"gate_up_proj": (2 * _INNER, _SIZE), "down_proj": (_SIZE, _INNER)}
    weights = {}
    for name, shape in shapes.items():
        weights[name] = draw_tensor(_EXPERTS, *(reversed(shape) if module.is_transposed else shape))
        if module.has_bias:
            weights[f"{name}_bias"] = draw_tensor(_EXPERTS, shape[0])
    probe = object.__new__(type(module))  # copy.copy calls __new__ of FSDP2's class, which runs __init__ of the layer's
    probe.__dict__.update(module.__dict__)
    probe.__dict__["_parameters"] = {name: nn.Parameter(weight) for name, weight in weights.items()}
    probe.__dict__["_modules"] = {
        name: child for name, child in module._modules.items() if not isinstance(child, ExpertAdapter)
    }
    probe.__dict__["num_experts"] = _EXPERTS
    probe.__dict__.pop(EXPERT_GROUP, None)
    probe.__dict__.pop("forward", None)
    index = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 2], [0, 1]])
    return probe, (draw_tensor(5, _SIZE), index, draw_tensor(5, 2).softmax(-1))
