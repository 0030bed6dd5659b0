"""Operators for CPUs: autograd functions with as few memory accesses as plain torch allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SMALL_ELEMENTS = 2**14
"""Elements up to which the call overhead dominates: fewer calls are then faster, though they copy more."""


def _normalize_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized rows, and the inverse RMS of every row."""
    upcast = x.float()
    inverse_rms = torch.linalg.vector_norm(upcast, dim=-1, keepdim=True)
    inverse_rms = inverse_rms.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed = (upcast * inverse_rms).to(x.dtype)
    return normed.mul_(weight) if weight.dtype == normed.dtype else normed * weight, inverse_rms


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse_rms = _normalize_rows(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = grads[0].float()
        upcast = x.float()
        normed = upcast * inverse_rms
        d_weight = None
        product = grad * normed
        if ctx.needs_input_grad[1]:
            d_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        projection = (product @ weight.float()).unsqueeze(-1).mul_(-1 / x.shape[-1])
        d_x = (grad * weight).addcmul_(normed, projection).mul_(inverse_rms)
        return d_x.to(x.dtype), d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with an explicit gradient; 1.7x to 2x the speed of the composed form on a CPU (docs/dev)."""
    if not torch.is_grad_enabled():  # for a generated token the overhead of autograd dominates
        if x.numel() <= _SMALL_ELEMENTS and x.dtype == weight.dtype == torch.float32:
            return torch.rms_norm(x, weight.shape, weight, eps)
        return _normalize_rows(x, weight, eps)[0]
    out: Tensor = _RmsNormFunction.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = cos.shape[-1] // 2
        # The transposed map takes each half's sine from the other half.
        swapped = torch.cat((sin[..., half:], sin[..., :half]), dim=-1)
        return _rotate_halves(grads[0], cos, swapped, -1.0), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding without the concatenated copy; the gradient is the inverse rotation."""
    if not torch.is_grad_enabled():
        if x.numel() <= _SMALL_ELEMENTS:
            first, second = x.chunk(2, dim=-1)
            return (x * cos).addcmul_(torch.cat((second.neg(), first), dim=-1), sin)
        return _rotate_halves(x, cos, sin, 1.0)
    out: Tensor = _RotaryFunction.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out
