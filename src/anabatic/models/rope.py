"""Rotary embeddings of transformers' models: which way they turn, and one model's attention with another operator.

Attention modules call `apply_rotary_pos_emb` of their file by name. An exchanged forward sees another function by that
name; the file, and every other model made from it, keep theirs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anabatic.device.ops import REFERENCE, Ops

NAMES = ("apply_rotary_pos_emb",)
_HEAD = 8


@functools.cache
def halves(ops: Ops) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function by a device's operator; heads wider than the cosines keep the rest as it is (Phi-3, GLM).

    All layers are given the same angles: they are cast once and remembered until there are others.
    """
    last: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def angles(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        nonlocal last
        if cos.dtype == dtype:
            return cos, sin
        if last is None or last[0] is not cos or last[1] is not sin or last[2].dtype != dtype:
            last = (cos, sin, cos.to(dtype), sin.to(dtype))
        return last[2:]

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size = cos.shape[-1]
        if size == x.shape[-1]:
            return ops.rotary(x, cos, sin)
        return torch.cat((ops.rotary(x[..., :size], cos, sin), x[..., size:]), dim=-1)

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = (x.unsqueeze(unsqueeze_dim) for x in angles(cos, sin, q.dtype))
        return turn(q, cos, sin), turn(k, cos, sin)

    return apply_rotary_pos_emb


def rotates_halves(function: Callable[..., Any]) -> bool:
    """True when a file's function turns halves: whole heads, and parts of heads too unless it refuses them."""
    return _same(function, _HEAD) is True and _same(function, _HEAD // 2) is not False


def _same(function: Callable[..., Any], size: int) -> bool | None:
    """Does it turn the first `size` numbers of a head as `halves` does? None: it does not take such inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 3, _HEAD, generator=generator) for _ in range(2))
    angles = torch.randn(1, 3, size // 2, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        out = function(q, k, cos, sin)
    except (TypeError, RuntimeError):
        return None
    expected = halves(REFERENCE)(q, k, cos, sin)
    return len(out) == 2 and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(out, expected, strict=True)
    )


def with_function(method: types.FunctionType, name: str, function: Callable[..., Any]) -> types.FunctionType:
    """Return a copy of `method` that sees `function` where it calls `name`."""
    seen = {**method.__globals__, name: function}
    made = types.FunctionType(method.__code__, seen, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    return made
