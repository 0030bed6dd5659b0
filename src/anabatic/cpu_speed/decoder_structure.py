"""Recognizes decoder layers of Llama's structure: the parts by name, and norms by what they hold.

What the parts compute is for the caller to verify, by a probe of the layer's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anabatic.cpu_speed.decoder_layer import LINEAR_NAMES, NORM_NAMES

_LAYER_PARTS = {"self_attn", "mlp", *NORM_NAMES[:2]}
_ATTENTION_PARTS, _MLP_PARTS = set(LINEAR_NAMES[:4]), set(LINEAR_NAMES[4:])
_HEAD_NORMS = set(NORM_NAMES[2:])


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
