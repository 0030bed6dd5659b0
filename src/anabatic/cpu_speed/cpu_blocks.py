"""Blocks of attention (`device/block_attention.py`) by torch's kernel for processors.

Shapes: `n` queries, `m` keys, `N` query heads, `K` key/value heads (N a multiple of K), `D` head size of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabatic.cpu_speed.decoder_layer import attend_backward, attend_forward
from anabatic.device.attention import PackedSegments
from anabatic.device.block_attention import BlockOps

_ops = torch.ops.aten


def block_forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute a block by torch's kernel for processors, in fp32."""
    q, k, v = q.float(), k.float(), v.float()
    if segments is None:
        whole = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(*whole, 0.0, False, scale=scale)
        return out.squeeze(0).transpose(0, 1), lse.squeeze(0).t()
    out, kept = attend_forward(q, k, v, segments, scale)
    rows = [lse.transpose(1, 2).flatten(0, 1) for lse in kept[1::2]]  # `[rows, N, length]` of each group
    return out, segments.gather_packed(rows[0] if len(rows) == 1 else torch.cat(rows))


def block_backward_cpu(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: PackedSegments | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a block by torch's kernel for processors, in fp32."""
    dtype = q.dtype
    grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    if segments is None:
        whole = [x.transpose(0, 1).unsqueeze(0) for x in (grad, q, k, v, out)]
        found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *whole, lse.t().unsqueeze(0), 0.0, False, scale=scale
        )
        d_q, d_k, d_v = (x.squeeze(0).transpose(0, 1) for x in found)
    else:
        spread_out, spread_lse = segments.spread_groups(out), segments.spread_groups(lse)
        kept: list[Tensor] = []
        for start, rows, length in segments.groups:
            for x in (spread_out, spread_lse):
                kept.append(x[start : start + rows * length].unflatten(0, (rows, length)).transpose(1, 2))
        joint, d_v = attend_backward(grad, q, k, v, segments, scale, kept)
        d_q, d_k = joint.split([q.shape[1], k.shape[1]], dim=1)
    return d_q.to(dtype), d_k.to(dtype), d_v.to(dtype)


CPU_BLOCKS = BlockOps(block_forward_cpu, block_backward_cpu)
