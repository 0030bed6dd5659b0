"""Install the device's fused operators in a model: modules are matched by structure and verified by a probe."""

from __future__ import annotations

import copy
import functools
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from anabatic.core.cpu_info import find_speedup
from anabatic.device.ops import REFERENCE_OPS, DeviceOps, get_device_ops, get_plain_sinks_reason
from anabatic.device.table import DEVICES
from anabatic.models import weight_casts
from anabatic.models.experts import expert_layers
from anabatic.models.lora.adapter import runs_own_forward
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
    if runs_own_forward(model):
        return "fused: off (rows go through the model's own forward pass)"
    if choice == "off":
        remove_fused_ops(model)
        return "fused: off (asked for); attention is packed anyway"
    summary = install_fused_ops(model, get_device_ops(device_type))
    install_layers = find_speedup("fused_layers", "install_layers") if DEVICES[device_type].fuse_layers else None
    if install_layers is not None:
        summary.fused["decoder layers"] = install_layers(model)
    _count_sinks(model, summary, device_type)
    model.__dict__["adapter_bank"] = group_adapters(model) if DEVICES[device_type].group_adapters else None
    if bank := model.__dict__["adapter_bank"]:
        adapters = sum(len(group.layers) for group in bank.groups)
        summary.fused[f"adapters in {len(bank.groups)} groups"] = adapters
    return f"{summary}, attention packed"


def _count_sinks(model: nn.Module, summary: FusionSummary, device_type: str) -> None:
    """Count layers whose attention has sinks (gpt-oss): not every version of the fused operator computes them."""
    layers = sum(isinstance(getattr(module, "sinks", None), Tensor) for module in model.modules())
    if not layers:
        return
    reason = get_plain_sinks_reason(device_type)
    if reason:
        summary.plain[f"attentions with sinks ({reason})"] = layers
    else:
        summary.fused["attentions with sinks"] = layers


def remove_fused_ops(model: nn.Module) -> None:
    """Restore the original forward of every module."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, types.MethodType) and "_anabatic" in forward.__func__.__dict__:
            del module.__dict__["forward"]
            expert_layers.keep_needed_forward(module)


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
        gate_up = None
        if not torch.compiler.is_compiling():  # layers in groups, of which a compiler sees nothing
            if weight_casts.GROUP in gate.__dict__:
                whole = weight_casts.compute_gated_mlp(gate, up, down, x, ops.swiglu_joint)
                if whole is not None:
                    return whole
            if getattr(gate, "group", None) is not None:
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
    original = _skip_deprecations(type(module).forward)
    if not isinstance(original, types.FunctionType):
        return None
    names = original.__code__.co_names
    function_name = next((name for name in names if name in ROTARY_FUNCTION_NAMES), None)
    if function_name is None:
        return None
    others = [name for name in names if name.startswith("apply_rotary") and name != function_name]
    kind = None if others or original.__closure__ else detect_rotary_kind(original.__globals__[function_name])
    if kind is None:
        return None, "rotary embeddings", "of another kind"
    return (
        replace_function(original, function_name, make_rotary_function(ops, kind)),
        "rotary embeddings",
        "",
    )


def _skip_deprecations(method: Any) -> Any:
    """Return what is below transformers' decorators that only rename old arguments; its layers use the new names."""
    while getattr(method, "__globals__", {}).get("__name__") == "transformers.utils.deprecation":
        method = method.__wrapped__
    return method


def _match_experts(module: nn.Module, ops: DeviceOps) -> FusionChoice | None:
    if _JOINT_LAYER_NAMES[0] not in module._parameters or not expert_layers.is_expert_layer(module):
        return None
    return expert_layers.choose_expert_forward(module, ops)


@torch.no_grad()
def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Apply torch.compile to norms and gated blocks, whose shapes are equal for every packed batch; return how many.

    Attention is not compiled: its plan differs between batches, and every plan would trigger a recompilation. Without
    gradients the blocks run as they are: samples and evaluations have other shapes, each of which would be compiled.
    """
    blocks = [
        module
        for module in model.modules()
        if _match_norm(module, REFERENCE_OPS) or _match_gated(module, REFERENCE_OPS)
    ]
    for module in blocks:
        module.compile(dynamic=False, backend=backend)
        compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = functools.partial(_call_block, module, compiled)
    return len(blocks)


def _call_block(module: nn.Module, compiled: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return (compiled if torch.is_grad_enabled() else module._call_impl)(*args, **options)


RotaryKind = Literal["halves", "spread", "neighbours"]
"""Element i of a head is paired with element i + half (Llama); or with its neighbour, with the first half of the angles
repeated (GLM), or with angles that are already repeated (Cohere)."""
ROTARY_FUNCTION_NAMES = ("apply_rotary_pos_emb",)
_HEAD = 8

RotaryFunction = Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def make_rotary_function(ops: DeviceOps, kind: RotaryKind) -> RotaryFunction:
    """Return the function with a device's operator; elements of a head beyond the angles are unchanged (Phi-3, GLM).

    All layers get the same angles: they are cast, repeated and reshaped once and cached until they change.
    """
    operator = ops.rotary if kind == "halves" else ops.rotary_neighbours
    cached: tuple[Tensor, Tensor, int, Tensor, Tensor] | None = None

    def fit_angle(angle: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        angle = angle.to(dtype)
        if kind == "spread":
            angle = angle[..., : angle.shape[-1] // 2].repeat_interleave(2, dim=-1)
        return angle.unsqueeze(dim)

    def fit_angles(cos: Tensor, sin: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        nonlocal cached
        if (
            cached is None
            or cached[0] is not cos
            or cached[1] is not sin
            or cached[2] != dim
            or cached[3].dtype != dtype
        ):
            cached = (cos, sin, dim, fit_angle(cos, dim, dtype), fit_angle(sin, dim, dtype))
        return cached[3:]

    def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return operator(x, cos, sin)
        return torch.cat((operator(x[..., :size], cos, sin), x[..., size:]), dim=-1)

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = fit_angles(cos, sin, unsqueeze_dim, q.dtype)
        if unsqueeze_dim == 1 and q.shape[2] == 1 and not torch.is_grad_enabled():  # one token: the fewest calls
            rotated = rotate_heads(torch.cat((q, k), dim=1), cos, sin)
            return rotated.split_with_sizes((q.shape[1], k.shape[1]), dim=1)
        return rotate_heads(q, cos, sin), rotate_heads(k, cos, sin)

    return apply_rotary_pos_emb


def detect_rotary_kind(function: Callable[..., Any]) -> RotaryKind | None:
    """Return the layout of a file's function for full heads, and partial heads if it supports them; None: unknown."""
    for kind in get_args(RotaryKind):
        if (
            _is_same_rotation(function, kind, _HEAD) is True
            and _is_same_rotation(function, kind, _HEAD // 2) is not False
        ):
            matched: RotaryKind = kind
            return matched
    return None


def _is_same_rotation(function: Callable[..., Any], kind: RotaryKind, size: int) -> bool | None:
    """Return whether it rotates the first `size` elements of a head like ours; None: it does not accept such inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 3, _HEAD, generator=generator) for _ in range(2))
    cos, sin = (torch.randn(1, 3, size, generator=generator) for _ in range(2))
    try:
        out = function(q, k, cos, sin)
    except (TypeError, RuntimeError):
        return None
    expected = make_rotary_function(REFERENCE_OPS, kind)(q, k, cos, sin)
    return len(out) == 2 and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(out, expected, strict=True)
    )


def replace_function(method: types.FunctionType, name: str, replacement: RotaryFunction) -> types.FunctionType:
    """Return a copy of `method` that calls `replacement` for `name`."""
    namespace = {**method.__globals__, name: replacement}
    copied = types.FunctionType(method.__code__, namespace, method.__name__, method.__defaults__, method.__closure__)
    copied.__kwdefaults__ = method.__kwdefaults__
    return copied
