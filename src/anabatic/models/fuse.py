"""Give a model the device's fused operators: modules are recognised by their shape and proved by their output.

A module is exchanged only if, on a small random input, the plain operator returns what the module returned. So a
norm that adds one to its weight, or a gate with another activation, stays as it is.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anabatic.device.ops import REFERENCE, Ops


@torch.no_grad()
def install(model: nn.Module, ops: Ops) -> dict[str, int]:
    """Exchange the forward of every recognised module; return how many of each kind."""
    found = {"rms_norm": 0, "swiglu": 0, "rotary": 0}
    for module in model.modules():
        if _is_rms_norm(module):
            module.forward = types.MethodType(_rms_norm_forward(ops), module)
            found["rms_norm"] += 1
        elif _is_swiglu(module):
            module.forward = types.MethodType(_swiglu_forward(ops), module)
            found["swiglu"] += 1
    for name in sorted({type(module).__module__ for module in model.modules()}):
        found["rotary"] += _install_rotary(sys.modules[name], ops)
    return found


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4)


def _probe(module: nn.Module, size: int) -> Tensor:
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, size, generator=generator).to(weight.device, weight.dtype)


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = module.__dict__.get(name)
        if isinstance(value, float):
            return value
    return None


def _is_rms_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    eps = _eps(module)
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or eps is None:
        return False
    weight = parameters["weight"]
    if weight.is_meta or isinstance(module, nn.LayerNorm):
        return False
    x = _probe(module, weight.numel())
    return _close(module(x), REFERENCE.rms_norm(x, weight, eps))


def _rms_norm_forward(ops: Ops) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        eps = _eps(self)
        assert eps is not None
        return ops.rms_norm(hidden_states, self.weight, eps)

    return forward


def _is_swiglu(module: nn.Module) -> bool:
    children = dict(module.named_children())
    linears = [children.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(child, nn.Linear) for child in linears):
        return False
    gate, up, down = linears
    assert isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    if gate.weight.is_meta:
        return False
    x = _probe(module, gate.in_features)
    return _close(module(x), down(REFERENCE.swiglu(gate(x), up(x))))


def _swiglu_forward(ops: Ops) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))
        return out

    return forward


def _install_rotary(source: types.ModuleType, ops: Ops) -> int:
    """Exchange a modelling file's `apply_rotary_pos_emb`, which its attention calls by that name.

    The exchange holds for the whole process: the function belongs to the file, not to one model.
    """
    original = source.__dict__.get("apply_rotary_pos_emb")
    if original is None or "anabatic_ops" in original.__dict__:
        return 0 if original is None else _rebind(original, ops)
    if not _rotates_halves(original):
        return 0

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        rotary = apply_rotary_pos_emb.__dict__["anabatic_ops"].rotary
        return rotary(q, cos, sin), rotary(k, cos, sin)

    apply_rotary_pos_emb.__dict__["anabatic_ops"] = ops
    source.__dict__["apply_rotary_pos_emb"] = apply_rotary_pos_emb
    return 1


def _rebind(function: Any, ops: Ops) -> int:
    function.__dict__["anabatic_ops"] = ops
    return 1


def _rotates_halves(function: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 3, 8, generator=generator) for _ in range(2))
    cos, sin = (torch.randn(1, 3, 8, generator=generator) for _ in range(2))
    try:
        out = function(q, k, cos, sin)
    except (TypeError, RuntimeError):
        return False
    wide = cos.unsqueeze(1), sin.unsqueeze(1)
    return len(out) == 2 and all(_close(a, REFERENCE.rotary(b, *wide)) for a, b in zip(out, (q, k), strict=True))


def compile_blocks(model: nn.Module) -> int:
    """torch.compile the norms and gated blocks, whose shapes are the same for every packed batch; return how many.

    Attention stays as it is: its plan differs from batch to batch, and every plan would be compiled anew.
    """
    blocks = [module for module in model.modules() if _is_rms_norm(module) or _is_swiglu(module)]
    for module in blocks:
        module.compile(dynamic=False)
    return len(blocks)
