"""Attention of some queries to some keys, with the statistics by which results over several sets of keys are merged.

The result over all keys is `sum_b exp(lse_b - lse) out_b` with `lse = log(sum_b exp(lse_b))` (arXiv 2112.05682, section
2). The gradient of a block needs only the merged output and `lse` (arXiv 2205.14135, appendix B.2), so a block is
computed without knowing of the others in both passes.

Shapes: `n` queries, `m` keys, `N` query heads, `K` key/value heads (N a multiple of K), `D` head size of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from anabatic.device.attention import PackedSegments


class BlockOps(NamedTuple):
    """The operators of a device.

    Attributes:
        forward: `(q, k, v, segments, scale)` -> output `[n, N, D]` and log-sum-exp of the scores, fp32 `[n, N]`.
            `segments`: queries and keys are the same tokens, and attention is causal inside each segment; None: every
            query sees every key.
        backward: `(grad, q, k, v, out, lse, segments, scale)` -> gradients of q, k and v; `grad`, `out` and `lse` are
            those of the merged result.
    """

    forward: Callable[[Tensor, Tensor, Tensor, PackedSegments | None, float], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, PackedSegments | None, float], tuple[Tensor, Tensor, Tensor]
    ]


def merge_block(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Merge the result over more keys into `out`, fp32 `[n, N, D]`, and `lse`, `[n, N]`, in place."""
    merged = torch.logaddexp(lse, block_lse)
    out.mul_((lse - merged).exp_().unsqueeze(-1)).addcmul_(block.float(), (block_lse - merged).exp_().unsqueeze(-1))
    lse.copy_(merged)


def _mask_of(segments: PackedSegments | None, device: torch.device) -> Tensor | None:
    """Return what a query sees, bool `[n, n]`."""
    if segments is None:
        return None
    borders = torch.tensor(segments.cu_seqlens, device=device)
    ids = torch.repeat_interleave(torch.arange(len(borders) - 1, device=device), borders.diff())
    return (ids[:, None] == ids[None, :]).tril_()


def _repeat(x: Tensor, heads: int) -> Tensor:
    """`[m, K, D]` -> `[N, m, D]`, fp32."""
    return x.float().repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)


def block_forward_reference(
    q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute a block in plain torch, with all scores in memory."""
    heads = q.shape[1]
    scores = q.float().transpose(0, 1) @ _repeat(k, heads).transpose(1, 2) * scale
    mask = _mask_of(segments, q.device)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ _repeat(v, heads)
    return out.transpose(0, 1), lse.t()


def block_backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: PackedSegments | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of a block in plain torch (arXiv 2205.14135, appendix B.2)."""
    heads, key_heads = q.shape[1], k.shape[1]
    queries, d_out = q.float().transpose(0, 1), grad.float().transpose(0, 1)
    keys, values = _repeat(k, heads), _repeat(v, heads)
    scores = queries @ keys.transpose(1, 2) * scale
    mask = _mask_of(segments, q.device)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    probs = (scores - lse.t().unsqueeze(-1)).exp_()
    dots = (d_out * out.float().transpose(0, 1)).sum(-1, keepdim=True)
    d_scores = (d_out @ values.transpose(1, 2) - dots).mul_(probs).mul_(scale)
    d_q = (d_scores @ keys).transpose(0, 1)
    d_k, d_v = d_scores.transpose(1, 2) @ queries, probs.transpose(1, 2) @ d_out
    shape = (key_heads, heads // key_heads, *d_k.shape[1:])
    d_k, d_v = (x.reshape(shape).sum(1).transpose(0, 1) for x in (d_k, d_v))
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


REFERENCE_BLOCKS = BlockOps(block_forward_reference, block_backward_reference)
