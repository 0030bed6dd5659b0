"""Whole decoder layers of Llama's structure as one autograd function, where the device table says that it pays.

A layer is matched by its children and verified by a probe of its class's own forward. Every call checks whether the
layer is still such a one, and otherwise runs its class's forward with the fused parts inside.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from anabatic.cpu_speed.decoder_layer import LINEAR_NAMES, NORM_NAMES, LayerPlan, LinearParts, run_decoder_layer
from anabatic.device.attention import PackedSegments
from anabatic.models.lora.linear import LoraLinear

_LAYER_PARTS = {"self_attn", "mlp", *NORM_NAMES[:2]}
_ATTENTION_PARTS, _MLP_PARTS = set(LINEAR_NAMES[:4]), set(LINEAR_NAMES[4:])
_HEAD_NORMS = set(NORM_NAMES[2:])
_DTYPES = (torch.float32, torch.bfloat16)
_SIZE, _INNER, _HEAD, _KV_HEADS = 8, 6, 4, 2
_LENGTHS = (5, 3)
"""Sizes of the probe, and the lengths of its segments."""


@dataclass(frozen=True)
class NormParts:
    """Weight `[size]` and eps of an RMSNorm."""

    weight: Tensor
    eps: float


@dataclass(frozen=True)
class DecoderParts:
    """Modules of a decoder layer.

    Attributes:
        norms: by `NORM_NAMES`; None: the layer has no such norm.
        linears: by `LINEAR_NAMES`.
    """

    norms: Sequence[Any]
    linears: Sequence[Any]


def find_unknown_part(layer: nn.Module) -> str:
    """Return what is unknown about a decoder layer's structure; empty: nothing."""
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    if set(layer._modules) != _LAYER_PARTS or attention is None or mlp is None or layer._parameters:
        return f"{type(layer).__name__} has other parts"
    if set(attention._modules) not in (_ATTENTION_PARTS, _ATTENTION_PARTS | _HEAD_NORMS) or attention._parameters:
        return f"{type(attention).__name__} has other parts"
    if set(mlp._modules) - {"act_fn"} != _MLP_PARTS or mlp._parameters:
        return f"{type(mlp).__name__} has other parts"
    if any(norm is not None and find_norm(norm) is None for norm in read_parts(layer).norms):
        return f"{type(layer).__name__} has other norms"
    return ""


def read_parts(layer: Any) -> DecoderParts:
    """Return the modules of a layer in which `find_unknown_part` finds nothing."""
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderParts(
        [
            *(layer._modules[name] for name in NORM_NAMES[:2]),
            *(attention._modules.get(name) for name in NORM_NAMES[2:]),
        ],
        [
            *(attention._modules[name] for name in LINEAR_NAMES[:4]),
            *(mlp._modules[name] for name in LINEAR_NAMES[4:]),
        ],
    )


def find_norm(module: nn.Module) -> NormParts | None:
    """Return weight and eps of an RMSNorm; None: it is none."""
    eps = next(
        (value for name in ("variance_epsilon", "eps") if isinstance(value := module.__dict__.get(name), float)), None
    )
    weight = module._parameters.get("weight")
    return None if eps is None or weight is None or len(module._parameters) != 1 else NormParts(weight, eps)


def read_norm(module: nn.Module) -> NormParts:
    """Return weight and eps of what is known to be an RMSNorm."""
    norm = find_norm(module)
    assert norm is not None
    return norm


def match_decoder_layer(layer: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that computes the layer as one function; None: it is of another structure."""
    if find_unknown_part(layer):
        return None
    if not all(map(_is_plain, layer.parameters())):  # divided among ranks: such a layer cannot be copied either
        return None
    attention: Any = layer.self_attn
    if not isinstance(getattr(attention, "scaling", None), float) or _rotates_a_part(attention):
        return None
    return _forward if _is_verified(layer) else None


def _rotates_a_part(attention: Any) -> bool:
    """True where rotary embeddings leave some elements of a head as they are (GLM-4.5)."""
    angles = getattr(getattr(attention, "config", None), "rope_parameters", None) or {}
    return bool(angles.get("partial_rotary_factor", 1.0) != 1.0)


def _parts_of(linear: Any) -> LinearParts:
    if isinstance(linear, LoraLinear):
        return LinearParts(linear.weight, linear.bias, linear.lora_A, linear.lora_B)
    return LinearParts(linear.weight, linear.bias)


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward of a matched layer; `segments` and `position_embeddings` are transformers' keyword arguments."""
    if torch.compiler.is_compiling():
        return type(self).forward(self, hidden_states, *args, **kwargs)
    parts = read_parts(self)
    norms, linears = parts.norms, parts.linears
    if args or not _can_run(self, hidden_states, norms, linears, kwargs):
        return type(self).forward(self, hidden_states, *args, **kwargs)
    segments, (cos, sin) = kwargs["segments"], kwargs["position_embeddings"]
    segments.num_attended_layers += 1
    rows = segments.output_rows if _is_last(self.self_attn) else None
    segments.has_dropped_rows |= rows is not None
    out = run_decoder_layer(
        hidden_states[0],
        cos[0].float(),
        sin[0].float(),
        [None if norm is None else norm.weight for norm in norms],
        [_parts_of(linear) for linear in linears],
        _plan_of(self.self_attn, norms, linears, segments, rows),
    )
    return out.unsqueeze(0)


def _is_last(attention: Any) -> bool:
    """True for the layer after which only the final norm follows."""
    return bool(attention.layer_idx == attention.config.num_hidden_layers - 1)


def _plan_of(
    attention: Any, norms: Sequence[Any], linears: Sequence[Any], segments: PackedSegments, rows: Tensor | None = None
) -> LayerPlan:
    weight = linears[0].weight
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
    return LayerPlan(
        tuple(0.0 if norm is None else read_norm(norm).eps for norm in norms),
        tuple(float(getattr(linear, "scale", 1.0)) for linear in linears),
        int(attention.head_dim),
        attention.scaling,
        dtype,
        segments,
        rows,
    )


def _can_run(layer: Any, x: Tensor, norms: Sequence[Any], linears: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True in training, with causal segments and without what only the modules themselves know."""
    segments = kwargs.get("segments")
    if not torch.is_grad_enabled() or type(segments) is not PackedSegments or not segments.is_causal:
        return False
    if segments.exchange is not None and not segments.exchange.gathers_heads:
        return False
    if x.device.type != "cpu" or x.dtype not in _DTYPES or x.shape[0] != 1 or is_in_torch_dispatch_mode():
        return False
    if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values"):
        return False
    attention = layer.self_attn
    if kwargs["position_embeddings"][0].shape[-1] != attention.head_dim:
        return False
    modules = [attention, layer.mlp, *norms, *linears]
    if not all(module is None or _is_bare(module) for module in modules):
        return False
    dropped = layer.training and attention.__dict__.get("attention_dropout")
    return not dropped and _sees_all(attention, segments) and _are_plain(linears, layer.training)


def _is_bare(module: nn.Module) -> bool:
    """True for a module that nobody has hooked into, compiled, or whose parameters are not plain."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    compiled = module.__dict__.get("_compiled_call_impl") is not None
    return not hooked and not compiled and all(_is_plain(p) for p in module._parameters.values())


def _is_plain(parameter: Tensor | None) -> bool:
    return parameter is None or (type(parameter) is nn.Parameter and parameter.dtype in _DTYPES)


def _sees_all(attention: Any, segments: PackedSegments) -> bool:
    """True if no segment is longer than the layer's window, or the one that its configuration has."""
    window = getattr(attention, "sliding_window", None) or getattr(attention.config, "sliding_window", None)
    return not window or max(length for _, _, length in segments.groups) <= window


def _are_plain(linears: Sequence[Any], training: bool) -> bool:
    """True for linear layers, with adapters or without, of one dtype."""
    for linear in linears:
        if type(linear) is LoraLinear:
            if linear.quantized is not None or linear.lora_magnitude is not None or linear.input_group is not None:
                return False
            if linear.group is not None or (linear.dropout and training):
                return False
        elif type(linear) is not nn.Linear:
            return False
    return len({linear.weight.dtype for linear in linears}) == 1


@torch.no_grad()
def _is_verified(layer: nn.Module) -> bool:
    """True if the class's own forward gives what the function gives, on small weights and two segments."""
    generator = torch.Generator().manual_seed(0)

    def draw_normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 2

    probe = _make_probe(layer, draw_normal)
    x = draw_normal(1, sum(_LENGTHS), _SIZE)
    half = draw_normal(1, sum(_LENGTHS), _HEAD // 2)
    cos, sin = torch.cat((half.cos(), half.cos()), -1), torch.cat((half.sin(), half.sin()), -1)
    borders = [0, _LENGTHS[0], sum(_LENGTHS)]
    arguments = {"attention_mask": None, "position_ids": None, "use_cache": False, "position_embeddings": (cos, sin)}
    try:
        expected = type(layer).forward(probe, x, segments=PackedSegments(borders, x.device), **arguments)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
        return False
    parts = read_parts(probe)
    plan = _plan_of(probe.self_attn, parts.norms, parts.linears, PackedSegments(borders, x.device))
    weights = [None if norm is None else norm.weight for norm in parts.norms]
    out = run_decoder_layer(x[0], cos[0], sin[0], weights, [_parts_of(linear) for linear in parts.linears], plan)
    return isinstance(expected, Tensor) and torch.allclose(expected, out.unsqueeze(0), rtol=1e-3, atol=1e-4)


def _make_probe(layer: nn.Module, draw_normal: Callable[..., Tensor]) -> Any:
    """Return a small copy that shares nothing but settings."""
    attention: Any = layer.self_attn
    width = _HEAD * _KV_HEADS * int(getattr(attention, "num_key_value_groups", 1))
    narrow = _HEAD * _KV_HEADS
    sizes = [
        (width, _SIZE),
        (narrow, _SIZE),
        (narrow, _SIZE),
        (_SIZE, width),
        (_INNER, _SIZE),
        (_INNER, _SIZE),
        (_SIZE, _INNER),
    ]
    linears = {
        name: _small_linear(shape, old.bias is not None, draw_normal)
        for name, shape, old in zip(LINEAR_NAMES, sizes, read_parts(layer).linears, strict=True)
    }
    norms = dict(zip(NORM_NAMES, read_parts(layer).norms, strict=True))
    small = {
        name: _copied(norm, {"weight": nn.Parameter(draw_normal(_HEAD if name in NORM_NAMES[2:] else _SIZE))}, {})
        for name, norm in norms.items()
        if norm is not None
    }
    own = {name: module for name, module in {**linears, **small}.items() if name in attention._modules}
    probed = _copied(attention, {}, own)
    probed.__dict__["head_dim"] = _HEAD
    mlp = _copied(layer.mlp, {}, {name: linears[name] for name in LINEAR_NAMES[4:]})
    return _copied(layer, {}, {"self_attn": probed, "mlp": mlp, **{name: small[name] for name in NORM_NAMES[:2]}})


def _small_linear(shape: tuple[int, int], biased: bool, draw_normal: Callable[..., Tensor]) -> nn.Linear:
    linear = nn.Linear.__new__(nn.Linear)  # its own start draws random numbers; torch's `skip_init` imports sympy
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = shape
    linear.weight = nn.Parameter(draw_normal(*shape))
    linear.register_parameter("bias", nn.Parameter(draw_normal(shape[0])) if biased else None)
    return linear


def _copied(module: Any, parameters: dict[str, nn.Parameter], children: dict[str, nn.Module]) -> Any:
    """Return a copy with other parameters and children that runs the forward of its class."""
    probe = copy.copy(module)
    probe.__dict__["_parameters"] = parameters
    probe.__dict__["_modules"] = {**module._modules, **children}
    probe.__dict__["_compiled_call_impl"] = None
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        probe.__dict__[kind] = type(module.__dict__[kind])()
    probe.__dict__.pop("forward", None)
    return probe


def install_layers(model: nn.Module) -> int:
    """Let every matching decoder layer run as one function; return how many. `remove_fused_ops` takes it back."""
    count = 0
    for module in model.modules():
        with torch.device("cpu"):
            forward = match_decoder_layer(module)
        if forward is not None:
            forward.__dict__["_anabatic"] = True
            module.__dict__["forward"] = types.MethodType(forward, module)
            count += 1
    return count
