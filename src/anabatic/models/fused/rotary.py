"""Rotary embeddings of transformers' models: which way they turn, and one model's attention with another operator.

Attention modules call `apply_rotary_pos_emb` of their file by name. An exchanged forward sees another function by that
name; the file, and every other model made from it, keep theirs.
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
"""Number i of a head turns with number i + half of it (Llama); or with its neighbour, by the first half of the angles
spread (GLM), or by angles that are spread already (Cohere)."""
ROTARY_FUNCTION_NAMES = ("apply_rotary_pos_emb",)
_HEAD = 8

RotaryFunction = Callable[..., tuple[Tensor, Tensor]]


@functools.cache
def make_rotary_function(ops: DeviceOps, kind: RotaryKind) -> RotaryFunction:
    """The function by a device's operator; heads wider than the angles keep the rest as it is (Phi-3, GLM).

    All layers are given the same angles: they are cast, spread and shaped once and remembered until there are others.
    """
    operator = ops.rotary if kind == "halves" else ops.rotary_neighbours
    last: tuple[Tensor, Tensor, int, Tensor, Tensor] | None = None

    def fit_angle(angle: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        angle = angle.to(dtype)
        if kind == "spread":
            angle = angle[..., : angle.shape[-1] // 2].repeat_interleave(2, dim=-1)
        return angle.unsqueeze(dim)

    def fit_angles(cos: Tensor, sin: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        nonlocal last
        if last is None or last[0] is not cos or last[1] is not sin or last[2] != dim or last[3].dtype != dtype:
            last = (cos, sin, dim, fit_angle(cos, dim, dtype), fit_angle(sin, dim, dtype))
        return last[3:]

    def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return operator(x, cos, sin)
        return torch.cat((operator(x[..., :size], cos, sin), x[..., size:]), dim=-1)

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = fit_angles(cos, sin, unsqueeze_dim, q.dtype)
        if unsqueeze_dim == 1 and q.shape[2] == 1 and not torch.is_grad_enabled():  # one token: the fewest calls
            both = rotate_heads(torch.cat((q, k), dim=1), cos, sin)
            return both.split_with_sizes((q.shape[1], k.shape[1]), dim=1)
        return rotate_heads(q, cos, sin), rotate_heads(k, cos, sin)

    return apply_rotary_pos_emb


def detect_rotary_kind(theirs: Callable[..., Any]) -> RotaryKind | None:
    """Which way a file's function turns whole heads, and parts of heads too unless it refuses them; None: another."""
    for kind in get_args(RotaryKind):
        if _is_same_rotation(theirs, kind, _HEAD) is True and _is_same_rotation(theirs, kind, _HEAD // 2) is not False:
            found: RotaryKind = kind
            return found
    return None


def _is_same_rotation(theirs: Callable[..., Any], kind: RotaryKind, size: int) -> bool | None:
    """Does it turn the first `size` numbers of a head as ours does? None: it does not take such inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 3, _HEAD, generator=generator) for _ in range(2))
    cos, sin = (torch.randn(1, 3, size, generator=generator) for _ in range(2))
    try:
        out = theirs(q, k, cos, sin)
    except (TypeError, RuntimeError):
        return None
    expected = make_rotary_function(REFERENCE_OPS, kind)(q, k, cos, sin)
    return len(out) == 2 and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(out, expected, strict=True)
    )


def replace_function(method: types.FunctionType, name: str, exchanged: RotaryFunction) -> types.FunctionType:
    """Return a copy of `method` that sees `exchanged` where it calls `name`."""
    seen = {**method.__globals__, name: exchanged}
    made = types.FunctionType(method.__code__, seen, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    return made
