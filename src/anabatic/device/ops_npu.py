"""Operators of torch_npu (op-plugin documentation, TorchNPU 26.2.0). Imported lazily: torch_npu is optional."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from anabatic.device.attention import AttentionOptions, attention_reference
from anabatic.device.segments import PackedSegments, PackedTrees


@functools.cache
def _import_torch_npu() -> Any:
    import torch_npu

    return torch_npu


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """The compressed mask that sparse modes 2 to 4 need: bool `[2048, 2048]`, True above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


def has_infinities() -> bool:
    """False on the first generation and the 310P, whose numbers end at the largest one."""
    return bool(_import_torch_npu().npu.utils.is_support_inf_nan())


def clear_overflow(room: Tensor) -> None:
    """npu_clear_float_status; room fp32 `[8]`."""
    _import_torch_npu().npu_clear_float_status(room)


def read_overflow(room: Tensor) -> Tensor:
    """npu_get_float_status: a scalar that is not 0 after an overflow; room fp32 `[8]`."""
    status: Tensor = _import_torch_npu().npu_get_float_status(room)
    return status[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """npu_rms_norm: one kernel instead of five. It takes an fp32 weight with a half-precision input."""
    gamma = weight if weight.dtype in (x.dtype, torch.float32) else weight.to(x.dtype)
    out: Tensor = _import_torch_npu().npu_rms_norm(x, gamma, eps)[0]
    return out


def _rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """npu_rotary_mul; x `[B, N, S, D]`, cos and sin `[1, 1, S, D]`.

    Models make `[B, S, N, D]` and turn it: given in that order the kernel reads and writes what attention wants.
    """
    turned = (y.transpose(1, 2) for y in (x, cos.to(x.dtype), sin.to(x.dtype)))
    out: Tensor = _import_torch_npu().npu_rotary_mul(*turned, mode)
    return out.transpose(1, 2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of a head turn together."""
    return _rotary_mul(x, cos, sin, "half")


def apply_rotary_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours turn together."""
    return _rotary_mul(x, cos, sin, "interleave")


def apply_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """npu_swiglu: silu(first half) * second half."""
    return apply_swiglu_joint(torch.cat((gate, up), dim=-1))


def apply_swiglu_joint(both: Tensor) -> Tensor:
    """npu_swiglu over `[..., 2 I]`."""
    out: Tensor = _import_torch_npu().npu_swiglu(both)
    return out


def fused_attention(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scores: AttentionOptions) -> Tensor:
    """npu_fusion_attention over packed tokens: layout TND, borders as a host list, inside each segment.

    Causal is sparse mode 3; both ways is mode 0 without a mask. A window is sparse mode 4: `pre_tockens` keys before a
    query's own, `next_tockens` after it. The kernel has no capped scores, no gradient of sinks, no values wider than
    keys, and in this layout no mask of one's own: those layers, and trees, are composed of plain operators.
    """
    if not scores.is_plain or v.shape[-1] > q.shape[-1] or isinstance(segments, PackedTrees):
        return attention_reference(q, k, v, segments, scores)
    borders = segments.cu_seqlens[1:]
    band: dict[str, Any] = {"sparse_mode": 3, "atten_mask": _causal_mask(q.device)} if segments.is_causal else {}
    if scores.window is not None:
        before = scores.window - 1
        band = {"sparse_mode": 4, "atten_mask": _causal_mask(q.device), "pre_tockens": before}
        band["next_tockens"] = 0 if segments.is_causal else before
    out: Tensor = _import_torch_npu().npu_fusion_attention(
        q,
        k,
        v,
        q.shape[1],
        "TND",
        scale=scores.scale,
        actual_seq_qlen=borders,
        actual_seq_kvlen=borders,
        **band,
    )[0]
    return out


def permute_tokens(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """npu_moe_token_permute: rows in the order of their experts, and where each choice went."""
    rows, places = _import_torch_npu().npu_moe_token_permute(x, index)
    return rows, places


def unpermute_tokens(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """npu_moe_token_unpermute: the weighted sum of each token's rows."""
    out: Tensor = _import_torch_npu().npu_moe_token_unpermute(rows, places, probs=weights)
    return out


def _npu_grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor, kind: int) -> Tensor:
    """`kind` 0: groups are rows of x; 2: they are its columns, and the products are stacked."""
    split = 2 if kind == 0 else 3
    out: Tensor = _import_torch_npu().npu_grouped_matmul(
        [x], [weight], bias=None, group_list=ends, split_item=split, group_type=kind, group_list_type=0
    )[0]
    return out


class _GroupedMatmul(torch.autograd.Function):
    """npu_grouped_matmul has no derivative of its own (op-plugin, config/derivatives.yaml)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _npu_grouped_matmul(x, weight, ends, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_x = _npu_grouped_matmul(grad, weight.transpose(1, 2), ends, 0) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1] and weight.stride(-1) == 1:
            d_weight = _npu_grouped_matmul(x.t(), grad, ends, 2)
        elif ctx.needs_input_grad[1]:  # stored the other way round: its gradient too, so that it is not turned
            d_weight = _npu_grouped_matmul(grad.t(), x, ends, 2).transpose(1, 2)
        return d_x, d_weight, None


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """npu_grouped_matmul: `x [S, in]`, `weight [E, in, out]`, ends of the groups `[E]` on the device -> `[S, out]`."""
    out: Tensor = _GroupedMatmul.apply(x.contiguous(), weight, ends)  # type: ignore[no-untyped-call]
    return out
