"""Rotary embeddings of transformers' models: detect their layout, and replace the operator in one model's attention.

Attention modules call `apply_rotary_pos_emb` of their file by name. The replaced forward finds another function under
that name; the file, and other models that use it, are unchanged.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from anabatic.device.ops import REFERENCE_OPS, DeviceOps

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
