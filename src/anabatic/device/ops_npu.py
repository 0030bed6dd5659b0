"""Operators of torch_npu (op-plugin documentation, TorchNPU 26.2.0). Imported lazily: torch_npu is optional."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from anabatic.device.segments import Segments


@functools.cache
def _torch_npu() -> Any:
    import torch_npu

    return torch_npu


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """The compressed mask that sparse modes 2 to 4 need: bool `[2048, 2048]`, True above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """npu_rms_norm: one kernel instead of five."""
    out: Tensor = _torch_npu().npu_rms_norm(x, weight.to(x.dtype), eps)[0]
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """npu_rotary_mul in half mode; x `[B, N, S, D]`, cos and sin `[1, 1, S, D]`."""
    out: Tensor = _torch_npu().npu_rotary_mul(x.contiguous(), cos.to(x.dtype), sin.to(x.dtype))
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """npu_swiglu: silu(first half) * second half."""
    out: Tensor = _torch_npu().npu_swiglu(torch.cat((gate, up), dim=-1))
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """npu_fusion_attention over packed tokens: layout TND, borders as a host list, causal inside each segment."""
    borders = segments.cu_seqlens[1:]
    out: Tensor = _torch_npu().npu_fusion_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        q.shape[1],
        "TND",
        atten_mask=_causal_mask(q.device),
        scale=scale,
        actual_seq_qlen=borders,
        actual_seq_kvlen=borders,
        sparse_mode=3,
    )[0]
    return out
