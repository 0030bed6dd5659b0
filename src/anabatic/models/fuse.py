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

from anabatic.device.ops import REFERENCE, Ops, for_device
from anabatic.device.table import DEVICES
from anabatic.models import moe, rope
from anabatic.models.lora_joint import gather, joint

_SIZE, _INNER = 8, 6
"""Sizes of the probes."""
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of gate, up and down."""
_GATED_JOINT = ("gate_up_proj", "down_proj")

Forward = Callable[..., Any]


@dataclass
class Found:
    """How many modules of a kind got fused operators, and how many stay plain, by reason."""

    fused: Counter[str] = field(default_factory=Counter)
    plain: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"fused: {_listed(self.fused)}; plain: {_listed(self.plain)}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


@torch.no_grad()
def install(model: nn.Module, ops: Ops) -> Found:
    """Exchange the forward of every recognised module, whatever device its weights are on.

    May be repeated, also with other operators; linear layers may be exchanged for adapted ones before or after.
    """
    found = Found()
    for module in model.modules():
        with torch.device("cpu"):
            forward, kind, reason = _choose(module, ops)
        if forward is not None:
            module.__dict__["forward"] = types.MethodType(forward, module)
            found.fused[kind] += 1
        elif reason:
            found.plain[f"{kind} ({reason})"] += 1
    return found


def settle(model: nn.Module, choice: Literal["auto", "off"], device_type: str) -> str:
    """Do what the setting `fused` says; return a line that tells what came of it.

    `auto`: fused operators and, on accelerators, adapters in groups; `off`: every module's own forward.
    """
    if choice == "off":
        remove(model)
        return "fused: off (asked for); attention is packed all the same"
    found = install(model, for_device(device_type))
    model.__dict__["adapter_bank"] = gather(model) if DEVICES[device_type].group_adapters else None
    if bank := model.__dict__["adapter_bank"]:
        adapters = sum(len(group.layers) for group in bank.groups)
        found.fused[f"adapters in {len(bank.groups)} groups"] = adapters
    return f"{found}, attention packed"


def remove(model: nn.Module) -> None:
    """Give every module its own forward back."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, types.MethodType) and "_anabatic" in forward.__func__.__dict__:
            del module.__dict__["forward"]


def _choose(module: nn.Module, ops: Ops) -> tuple[Forward | None, str, str]:
    """Return the fused forward or None, the module's kind, and why it stays plain; no reason: it is none of ours."""
    for recognise in (_norm, _gated, _rotated, _experts):
        choice = recognise(module, ops)
        if choice is not None:
            forward, kind, reason = choice
            if forward is not None:
                forward.__dict__["_anabatic"] = True
            return forward, kind, reason
    return None, "", ""


Choice = tuple[Forward | None, str, str]


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _probe(module: nn.Module, parameters: dict[str, Tensor], children: dict[str, nn.Module]) -> nn.Module:
    """A copy with other weights and children that runs the class's own forward."""
    probe = copy.copy(module)
    own = {name: child for name, child in module._modules.items() if name not in children}
    probe.__dict__["_parameters"] = {name: nn.Parameter(value) for name, value in parameters.items()}
    probe.__dict__["_modules"] = {**own, **children}
    probe.__dict__.pop("forward", None)
    probe.__dict__["_compiled_call_impl"] = None
    return probe


def _run(probe: nn.Module, x: Tensor) -> Tensor | None:
    """The output, or None where the module wants other inputs."""
    try:
        out = probe.forward(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return None
    return out if isinstance(out, Tensor) else None


def _linear(rows: int, columns: int, like: nn.Module) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=getattr(like, "bias", None) is not None)
    for parameter in layer.parameters():
        parameter.copy_(_random(*parameter.shape) / 2)
    return layer


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = module.__dict__.get(name)
        if isinstance(value, float):
            return value
    return None


def _norm(module: nn.Module, ops: Ops) -> Choice | None:
    """RMSNorm whose factor is its weight, or one more than its weight (Gemma)."""
    eps, own = _eps(module), module._parameters
    weight = own.get("weight")
    if eps is None or set(own) != {"weight"} or weight is None or weight.dim() != 1 or module._modules:
        return None
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        return None
    x, small = _random(3, _SIZE), _random(_SIZE)
    out = _run(_probe(module, {"weight": small}, {}), x)
    if out is None or out.shape != x.shape:
        return None
    for offset in (0, 1):
        if _close(out, REFERENCE.rms_norm(x, small + offset, eps)):
            return _norm_forward(ops, eps, offset), "RMSNorms", ""
    return None, "norms", type(module).__name__


def _norm_forward(ops: Ops, eps: float, offset: int) -> Forward:
    def plain(self: Any, x: Tensor) -> Tensor:
        return _narrow(ops.rms_norm(x, self.weight, eps), x)

    def one_more(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        wide = weight if weight.dtype == torch.float64 else weight.float()
        return _narrow(ops.rms_norm(x, 1 + wide, eps).to(x.dtype), x)

    return one_more if offset else plain


def _narrow(out: Tensor, x: Tensor) -> Tensor:
    """Cast a normed fp32 stream for the products that read it: autocast would, once and in memory for each of them."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return out.to(torch.get_autocast_dtype(kind))
    return out


def _gated(module: nn.Module, ops: Ops) -> Choice | None:
    """A gated block: `down(silu(gate x) * up x)`."""
    if module._parameters:
        return None
    for names in GATED:
        layers = _linears(module, names)
        if layers:
            gate, up, down = layers
            small = [_linear(_INNER, _SIZE, gate), _linear(_INNER, _SIZE, up), _linear(_SIZE, _INNER, down)]
            x = _random(3, _SIZE)
            expected = small[2](REFERENCE.swiglu(small[0](x), small[1](x)))
            return _gated_choice(module, names, small, x, expected, _gated_forward(ops, names))
    layers = _linears(module, _GATED_JOINT)
    if layers:
        small = [_linear(2 * _INNER, _SIZE, layers[0]), _linear(_SIZE, _INNER, layers[1])]
        x = _random(3, _SIZE)
        expected = small[1](REFERENCE.swiglu_joint(small[0](x)))
        return _gated_choice(module, _GATED_JOINT, small, x, expected, _joint_forward(ops))
    return None


def _linears(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    layers = [module._modules.get(name) for name in names]
    return [layer for layer in layers if isinstance(layer, nn.Linear)] if all(layers) else []


def _gated_choice(
    module: nn.Module, names: Sequence[str], small: Sequence[nn.Module], x: Tensor, expected: Tensor, forward: Forward
) -> Choice | None:
    if len(small) != len(names):
        return None
    out = _run(_probe(module, {}, dict(zip(names, small, strict=True))), x)
    if out is not None and _close(out, expected):
        return forward, "gated MLPs", ""
    activation = next((child for name, child in module._modules.items() if name not in names), None)
    return None, "MLPs", type(module).__name__ if activation is None else type(activation).__name__


def _gated_forward(ops: Ops, names: Sequence[str]) -> Forward:
    first, second, third = names

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up, down = self._modules[first], self._modules[second], self._modules[third]
        both = joint((gate, up), x)
        inner = ops.swiglu(gate(x), up(x)) if both is None else ops.swiglu_joint(both)
        out: Tensor = down(inner)
        return out

    return forward


def _joint_forward(ops: Ops) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(ops.swiglu_joint(self.gate_up_proj(x)))
        return out

    return forward


def _rotated(module: nn.Module, ops: Ops) -> Choice | None:
    """An attention module that turns queries and keys by a function of its file."""
    own = type(module).forward
    if not isinstance(own, types.FunctionType):
        return None
    names = own.__code__.co_names
    found = next((name for name in names if name in rope.NAMES), None)
    if found is None:
        return None
    others = [name for name in names if name.startswith("apply_rotary") and name != found]
    kind = None if others or own.__closure__ else rope.kind_of(own.__globals__[found])
    if kind is None:
        return None, "rotary embeddings", "of another kind"
    return rope.with_function(own, found, rope.function(ops, kind)), "rotary embeddings", ""


def _experts(module: nn.Module, ops: Ops) -> Choice | None:
    return moe.choose(module, ops) if moe.is_experts(module) else None


@torch.no_grad()
def compile_blocks(model: nn.Module) -> int:
    """torch.compile the norms and gated blocks, whose shapes are the same for every packed batch; return how many.

    Attention stays as it is: its plan differs from batch to batch, and every plan would be compiled anew.
    """
    blocks = [module for module in model.modules() if _norm(module, REFERENCE) or _gated(module, REFERENCE)]
    for module in blocks:
        module.compile(dynamic=False)
    return len(blocks)
