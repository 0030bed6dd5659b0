"""Give a model the device's fused operators: modules are recognised by their structure and proved by a probe.

A probe is a shallow copy of the module with a few small random weights in place of its own, so the weights themselves
may be anywhere: on `meta`, sharded, in half precision. A module gets the fused operator only if the probe returns what
the plain operator returns; a gate with another activation stays as it is, and the summary says so.
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
"""Names of gate, up and down."""
_JOINT_LAYER_NAMES = ("gate_up_proj", "down_proj")

Forward = Callable[..., Any]


@dataclass
class FusionSummary:
    """How many modules of a kind got fused operators, and how many stay plain, by reason."""

    fused: Counter[str] = field(default_factory=Counter)
    plain: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"fused: {_format_counts(self.fused)}; plain: {_format_counts(self.plain)}"


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


@torch.no_grad()
def install_fused_ops(model: nn.Module, ops: DeviceOps) -> FusionSummary:
    """Exchange the forward of every recognised module, whatever device its weights are on.

    May be repeated, also with other operators; linear layers may be exchanged for adapted ones before or after.
    """
    found = FusionSummary()
    for module in model.modules():
        with torch.device("cpu"):
            forward, kind, reason = _choose_forward(module, ops)
        if forward is not None:
            module.__dict__["forward"] = types.MethodType(forward, module)
            found.fused[kind] += 1
        elif reason:
            found.plain[f"{kind} ({reason})"] += 1
    return found


def apply_fused_setting(model: nn.Module, choice: Literal["auto", "off"], device_type: str) -> str:
    """Do what the setting `fused` says; return a line that tells what came of it.

    `auto`: fused operators and, on accelerators, adapters in groups; `off`: every module's own forward.
    """
    if choice == "off":
        remove_fused_ops(model)
        return "fused: off (asked for); attention is packed anyway"
    found = install_fused_ops(model, get_device_ops(device_type))
    model.__dict__["adapter_bank"] = group_adapters(model) if DEVICES[device_type].group_adapters else None
    if bank := model.__dict__["adapter_bank"]:
        adapters = sum(len(group.layers) for group in bank.groups)
        found.fused[f"adapters in {len(bank.groups)} groups"] = adapters
    return f"{found}, attention packed"


def remove_fused_ops(model: nn.Module) -> None:
    """Give every module its own forward back."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, types.MethodType) and "_anabatic" in forward.__func__.__dict__:
            del module.__dict__["forward"]


def _choose_forward(module: nn.Module, ops: DeviceOps) -> tuple[Forward | None, str, str]:
    """Return the fused forward or None, the module's kind, and why it stays plain; no reason: it is none of ours."""
    for recognise in (_match_norm, _match_gated, _match_rotary, _match_experts):
        choice = recognise(module, ops)
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
    """A copy with other weights and children that runs the class's own forward."""
    probe = copy.copy(module)
    own = {name: child for name, child in module._modules.items() if name not in children}
    probe.__dict__["_parameters"] = {name: nn.Parameter(value) for name, value in parameters.items()}
    probe.__dict__["_modules"] = {**own, **children}
    probe.__dict__.pop("forward", None)
    probe.__dict__["_compiled_call_impl"] = None
    return probe


def _run_probe(probe: nn.Module, x: Tensor) -> Tensor | None:
    """The output, or None where the module wants other inputs."""
    try:
        out = probe.forward(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return None
    return out if isinstance(out, Tensor) else None


def _random_linear(rows: int, columns: int, like: nn.Module) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=getattr(like, "bias", None) is not None)
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
    """RMSNorm whose factor is its weight, or one more than its weight (Gemma)."""
    eps, own = _get_eps(module), module._parameters
    weight = own.get("weight")
    if eps is None or set(own) != {"weight"} or weight is None or weight.dim() != 1 or module._modules:
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
        wide = weight if weight.dtype == torch.float64 else weight.float()
        return _cast_for_autocast(ops.rms_norm(x, 1 + wide, eps).to(x.dtype), x)

    return forward_offset if offset else forward_plain


def _cast_for_autocast(out: Tensor, x: Tensor) -> Tensor:
    """Cast a normed fp32 stream for the products that read it: autocast would, once and in memory for each of them."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return out.to(torch.get_autocast_dtype(kind))
    return out


def _match_gated(module: nn.Module, ops: DeviceOps) -> FusionChoice | None:
    """A gated block: `down(silu(gate x) * up x)`."""
    if module._parameters:
        return None
    for names in GATED_LAYER_NAMES:
        layers = _get_linears(module, names)
        if layers:
            gate, up, down = layers
            small = [
                _random_linear(_INNER, _SIZE, gate),
                _random_linear(_INNER, _SIZE, up),
                _random_linear(_SIZE, _INNER, down),
            ]
            x = _random_tensor(3, _SIZE)
            expected = small[2](REFERENCE_OPS.swiglu(small[0](x), small[1](x)))
            return _gated_choice(module, names, small, x, expected, _make_gated_forward(ops, names))
    layers = _get_linears(module, _JOINT_LAYER_NAMES)
    if layers:
        small = [_random_linear(2 * _INNER, _SIZE, layers[0]), _random_linear(_SIZE, _INNER, layers[1])]
        x = _random_tensor(3, _SIZE)
        expected = small[1](REFERENCE_OPS.swiglu_joint(small[0](x)))
        return _gated_choice(module, _JOINT_LAYER_NAMES, small, x, expected, _make_joint_forward(ops))
    return None


def _get_linears(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    layers = [module._modules.get(name) for name in names]
    return [layer for layer in layers if isinstance(layer, nn.Linear)] if all(layers) else []


def _gated_choice(
    module: nn.Module, names: Sequence[str], small: Sequence[nn.Module], x: Tensor, expected: Tensor, forward: Forward
) -> FusionChoice | None:
    if len(small) != len(names):
        return None
    out = _run_probe(_make_probe(module, {}, dict(zip(names, small, strict=True))), x)
    if out is not None and _is_close(out, expected):
        return forward, "gated MLPs", ""
    activation = next((child for name, child in module._modules.items() if name not in names), None)
    return None, "MLPs", type(module).__name__ if activation is None else type(activation).__name__


def _make_gated_forward(ops: DeviceOps, names: Sequence[str]) -> Forward:
    first, second, third = names

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up, down = self._modules[first], self._modules[second], self._modules[third]
        both = compute_joint_output((gate, up), x)
        inner = ops.swiglu(gate(x), up(x)) if both is None else ops.swiglu_joint(both)
        out: Tensor = down(inner)
        return out

    return forward


def _make_joint_forward(ops: DeviceOps) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(ops.swiglu_joint(self.gate_up_proj(x)))
        return out

    return forward


def _match_rotary(module: nn.Module, ops: DeviceOps) -> FusionChoice | None:
    """An attention module that turns queries and keys by a function of its file."""
    own = type(module).forward
    if not isinstance(own, types.FunctionType):
        return None
    names = own.__code__.co_names
    found = next((name for name in names if name in rotary.ROTARY_FUNCTION_NAMES), None)
    if found is None:
        return None
    others = [name for name in names if name.startswith("apply_rotary") and name != found]
    kind = None if others or own.__closure__ else rotary.detect_rotary_kind(own.__globals__[found])
    if kind is None:
        return None, "rotary embeddings", "of another kind"
    return rotary.replace_function(own, found, rotary.make_rotary_function(ops, kind)), "rotary embeddings", ""


def _match_experts(module: nn.Module, ops: DeviceOps) -> FusionChoice | None:
    return experts.choose_expert_forward(module, ops) if experts.is_expert_layer(module) else None


@torch.no_grad()
def compile_blocks(model: nn.Module) -> int:
    """torch.compile the norms and gated blocks, whose shapes are the same for every packed batch; return how many.

    Attention stays as it is: its plan differs from batch to batch, and every plan would be compiled again.
    """
    blocks = [
        module
        for module in model.modules()
        if _match_norm(module, REFERENCE_OPS) or _match_gated(module, REFERENCE_OPS)
    ]
    for module in blocks:
        module.compile(dynamic=False)
    return len(blocks)
