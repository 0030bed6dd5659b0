"""Install the device's fused operators in a model: modules are matched by structure and verified by a probe.

A probe is a shallow copy of the module with small random weights, so the module's own weights may be on `meta`,
sharded or in half precision. A module gets the fused operator only if the probe gives the result of the plain
operator; a gate with another activation stays unchanged, and the summary lists it.
"""

from __future__ import annotations

import copy
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anabatic.device.ops import REFERENCE_OPS, DeviceOps, get_device_ops
from anabatic.device.table import DEVICES
from anabatic.models.fused import experts, rotary
from anabatic.models.lora.grouped import compute_joint_output, group_adapters

_SIZE, _INNER = 8, 6
"""Sizes of the probes."""
GATED_LAYER_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the gate, up and down projections."""
_JOINT_LAYER_NAMES = ("gate_up_proj", "down_proj")

Forward = Callable[..., Any]


@dataclass
class FusionSummary:
    """Number of fused modules by kind, and of plain modules by kind and reason."""

    fused: Counter[str] = field(default_factory=Counter)
    plain: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"fused: {_format_counts(self.fused)}; plain: {_format_counts(self.plain)}"


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


@torch.no_grad()
def install_fused_ops(model: nn.Module, ops: DeviceOps) -> FusionSummary:
    """Replace the forward of every matching module, on any device.

    May be repeated, also with other operators; adapters may be inserted into linear layers before or after.
    """
    summary = FusionSummary()
    for module in model.modules():
        with torch.device("cpu"):
            forward, kind, reason = _choose_forward(module, ops)
        if forward is not None:
            module.__dict__["forward"] = types.MethodType(forward, module)
            summary.fused[kind] += 1
        elif reason:
            summary.plain[f"{kind} ({reason})"] += 1
    return summary


def apply_fused_setting(model: nn.Module, choice: Literal["auto", "off"], device_type: str) -> str:
    """Apply the setting `fused`; return a line about the result.

    `auto`: fused operators and, on accelerators, adapters in groups; `off`: every module's own forward.
    """
    if choice == "off":
        remove_fused_ops(model)
        return "fused: off (asked for); attention is packed anyway"
    summary = install_fused_ops(model, get_device_ops(device_type))
    model.__dict__["adapter_bank"] = group_adapters(model) if DEVICES[device_type].group_adapters else None
    if bank := model.__dict__["adapter_bank"]:
        adapters = sum(len(group.layers) for group in bank.groups)
        summary.fused[f"adapters in {len(bank.groups)} groups"] = adapters
    return f"{summary}, attention packed"


def remove_fused_ops(model: nn.Module) -> None:
    """Restore the original forward of every module."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, types.MethodType) and "_anabatic" in forward.__func__.__dict__:
            del module.__dict__["forward"]


def _choose_forward(module: nn.Module, ops: DeviceOps) -> tuple[Forward | None, str, str]:
    """Return the fused forward or None, the module's kind, and why it stays plain; no reason: no match."""
    for match in (_match_norm, _match_gated, _match_rotary, _match_experts):
        choice = match(module, ops)
        if choice is not None:
            forward, kind, reason = choice
            if forward is not None:
                forward.__dict__["_anabatic"] = True
            return forward, kind, reason
    return None, "", ""


FusionChoice = tuple[Forward | None, str, str]


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4)


def _random_tensor(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _make_probe(module: nn.Module, parameters: dict[str, Tensor], children: dict[str, nn.Module]) -> nn.Module:
    """Return a copy with other weights and children that runs the forward of its class."""
    probe = copy.copy(module)
    kept = {name: child for name, child in module._modules.items() if name not in children}
    probe.__dict__["_parameters"] = {name: nn.Parameter(value) for name, value in parameters.items()}
    probe.__dict__["_modules"] = {**kept, **children}
    probe.__dict__.pop("forward", None)
    probe.__dict__["_compiled_call_impl"] = None
    return probe


def _run_probe(probe: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output, or None if the module needs other inputs."""
    try:
        out = probe.forward(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return None
    return out if isinstance(out, Tensor) else None


def _random_linear(rows: int, columns: int, base: nn.Module) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=getattr(base, "bias", None) is not None)
    for parameter in layer.parameters():
        parameter.copy_(_random_tensor(*parameter.shape) / 2)
    return layer


def _get_eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = module.__dict__.get(name)
        if isinstance(value, float):
            return value
    return None


def _match_norm(module: nn.Module, ops: DeviceOps) -> FusionChoice | None:
    """Match an RMSNorm whose factor is its weight, or its weight plus one (Gemma)."""
    eps, parameters = _get_eps(module), module._parameters
    weight = parameters.get("weight")
    if eps is None or set(parameters) != {"weight"} or weight is None or weight.dim() != 1 or module._modules:
        return None
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        return None
    x, small = _random_tensor(3, _SIZE), _random_tensor(_SIZE)
    out = _run_probe(_make_probe(module, {"weight": small}, {}), x)
    if out is None or out.shape != x.shape:
        return None
    for offset in (0, 1):
        if _is_close(out, REFERENCE_OPS.rms_norm(x, small + offset, eps)):
            return _make_norm_forward(ops, eps, offset), "RMSNorms", ""
    return None, "norms", type(module).__name__


def _make_norm_forward(ops: DeviceOps, eps: float, offset: int) -> Forward:
    def forward_plain(self: Any, x: Tensor) -> Tensor:
        return _cast_for_autocast(ops.rms_norm(x, self.weight, eps), x)

    def forward_offset(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        upcast = weight if weight.dtype == torch.float64 else weight.float()
        return _cast_for_autocast(ops.rms_norm(x, 1 + upcast, eps).to(x.dtype), x)

    return forward_offset if offset else forward_plain


def _cast_for_autocast(out: Tensor, x: Tensor) -> Tensor:
    """Cast a normalized fp32 output once; autocast would cast it for every product that reads it."""
    device_type = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return out.to(torch.get_autocast_dtype(device_type))
    return out


def _match_gated(module: nn.Module, ops: DeviceOps) -> FusionChoice | None:
    """Match a gated block: `down(silu(gate x) * up x)`."""
    if module._parameters:
        return None
    for names in GATED_LAYER_NAMES:
        layers = _get_linears(module, names)
        if layers:
            gate, up, down = layers
            probes = [
                _random_linear(_INNER, _SIZE, gate),
                _random_linear(_INNER, _SIZE, up),
                _random_linear(_SIZE, _INNER, down),
            ]
            x = _random_tensor(3, _SIZE)
            expected = probes[2](REFERENCE_OPS.swiglu(probes[0](x), probes[1](x)))
            return _gated_choice(module, names, probes, x, expected, _make_gated_forward(ops, names))
    layers = _get_linears(module, _JOINT_LAYER_NAMES)
    if layers:
        probes = [_random_linear(2 * _INNER, _SIZE, layers[0]), _random_linear(_SIZE, _INNER, layers[1])]
        x = _random_tensor(3, _SIZE)
        expected = probes[1](REFERENCE_OPS.swiglu_joint(probes[0](x)))
        return _gated_choice(module, _JOINT_LAYER_NAMES, probes, x, expected, _make_joint_forward(ops))
    return None


def _get_linears(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    layers = [module._modules.get(name) for name in names]
    return [layer for layer in layers if isinstance(layer, nn.Linear)] if all(layers) else []


def _gated_choice(
    module: nn.Module, names: Sequence[str], probes: Sequence[nn.Module], x: Tensor, expected: Tensor, forward: Forward
) -> FusionChoice | None:
    if len(probes) != len(names):
        return None
    out = _run_probe(_make_probe(module, {}, dict(zip(names, probes, strict=True))), x)
    if out is not None and _is_close(out, expected):
        return forward, "gated MLPs", ""
    activation = next((child for name, child in module._modules.items() if name not in names), None)
    return None, "MLPs", type(module).__name__ if activation is None else type(activation).__name__


def _make_gated_forward(ops: DeviceOps, names: Sequence[str]) -> Forward:
    gate_name, up_name, down_name = names

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up, down = self._modules[gate_name], self._modules[up_name], self._modules[down_name]
        gate_up = compute_joint_output((gate, up), x)
        inner = ops.swiglu(gate(x), up(x)) if gate_up is None else ops.swiglu_joint(gate_up)
        out: Tensor = down(inner)
        return out

    return forward


def _make_joint_forward(ops: DeviceOps) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(ops.swiglu_joint(self.gate_up_proj(x)))
        return out

    return forward


def _match_rotary(module: nn.Module, ops: DeviceOps) -> FusionChoice | None:
    """Match an attention module that applies a rotary function of its file to queries and keys."""
    original = type(module).forward
    if not isinstance(original, types.FunctionType):
        return None
    names = original.__code__.co_names
    function_name = next((name for name in names if name in rotary.ROTARY_FUNCTION_NAMES), None)
    if function_name is None:
        return None
    others = [name for name in names if name.startswith("apply_rotary") and name != function_name]
    kind = None if others or original.__closure__ else rotary.detect_rotary_kind(original.__globals__[function_name])
    if kind is None:
        return None, "rotary embeddings", "of another kind"
    return (
        rotary.replace_function(original, function_name, rotary.make_rotary_function(ops, kind)),
        "rotary embeddings",
        "",
    )


def _match_experts(module: nn.Module, ops: DeviceOps) -> FusionChoice | None:
    return experts.choose_expert_forward(module, ops) if experts.is_expert_layer(module) else None


@torch.no_grad()
def compile_blocks(model: nn.Module) -> int:
    """Apply torch.compile to norms and gated blocks, whose shapes are equal for every packed batch; return how many.

    Attention is not compiled: its plan differs between batches, and every plan would trigger a recompilation.
    """
    blocks = [
        module
        for module in model.modules()
        if _match_norm(module, REFERENCE_OPS) or _match_gated(module, REFERENCE_OPS)
    ]
    for module in blocks:
        module.compile(dynamic=False)
    return len(blocks)
