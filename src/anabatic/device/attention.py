"""Attention over packed segments in plain torch: causal or both ways, with a window, capped scores and sinks where
models have them.

Shapes: `T` tokens, `R` segments side by side, `N` query heads, `K` key/value heads (N a multiple of K), `D` head size
of queries and keys, `E` head size of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.device.segments import PackedSegments, PackedTrees


class AttentionOptions(NamedTuple):
    """What a layer does to its scores before and in the softmax."""

    scale: float
    """Factor on the scores."""
    window: int | None = None
    """A query sees this many positions, its own included (Mistral, arXiv 2310.06825), without a causal mask as many
    after it; None: all."""
    softcap: float | None = None
    """`cap * tanh(score / cap)` (Gemma 2, arXiv 2408.00118, section 2)."""
    sinks: Tensor | None = None
    """One learned score per query head, `[N]`, that takes its share of the softmax and has no value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Nothing but a softmax: fused kernels do it."""
        return self.softcap is None and self.sinks is None


def attention_reference(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scores: AttentionOptions) -> Tensor:
    """Attention inside each segment, causal, both ways or along the paths of a tree; segments of like length share one
    call, so hardly anything is padded.

    Right padding needs no mask under a causal mask: no real query sees a later key.

    Args:
        q: `[T, N, D]`; k: `[T, K, D]`; v: `[T, K, E]`.
        segments: where the segments lie.

    Returns:
        `[T, N, E]`.
    """
    sizes = [rows * length for _, rows, length in segments.groups]
    # One split: the gradient of every slice by itself would be zeros for all tokens, added up.
    parts = zip(*(segments.spread_groups(x).split(sizes) for x in (q, k, v)), strict=True)
    pieces = []
    for number, ((_, rows, length), part) in enumerate(zip(segments.groups, parts, strict=True)):
        a, b, c = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in part)
        if isinstance(segments, PackedTrees):
            out = attend_masked(a, b, c, segments.build_mask(number, scores.window), scores)
        else:
            out = (
                _attend_causal(a, b, c, scores)
                if segments.is_causal
                else _attend_bidirectional(a, b, c, segments.valid_keys[number], scores)
            )
        pieces.append(out.transpose(1, 2).flatten(0, 1))
    return segments.gather_packed(pieces[0] if len(pieces) == 1 else torch.cat(pieces))


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, scores: AttentionOptions) -> Tensor:
    """q `[R, N, L, D]`, k `[R, K, L, D]`, v `[R, K, L, E]` -> `[R, N, L, E]`; a window's cost grows with L, not L^2."""
    length, window = q.shape[2], scores.window
    narrow = window is not None and window < length
    if scores.is_plain and not narrow:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    width = window if narrow and window is not None else length
    pieces = []
    for start in range(0, length, width):
        first, end = max(0, start - width + 1), min(length, start + width)
        row = torch.arange(start, end, device=q.device)[:, None]
        column = torch.arange(first, end, device=q.device)[None, :]
        mask = (column <= row) & (column > row - width)
        pieces.append(attend_masked(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], mask, scores))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _attend_bidirectional(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scores: AttentionOptions) -> Tensor:
    """As `_attend_causal`, but a query also sees later keys, and no padding.

    Args:
        real: bool `[R, 1, 1, L]`, keys that are no padding; None: all are. The padding of the queries sees real keys
            alone, too, so it has numbers, which nobody reads.
    """
    length = q.shape[2]
    mask = real
    if scores.window is not None and scores.window < length:
        place = torch.arange(length, device=q.device)
        near = (place[:, None] - place[None, :]).abs() < scores.window
        own = place[:, None] == place[None, :]  # a query of the padding would else see nothing
        mask = near if real is None else (near & real) | own
    if mask is None and scores.is_plain:
        return F.scaled_dot_product_attention(q, k, v, scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1])
    if mask is None:
        mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device)
    return attend_masked(q, k, v, mask, scores)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: AttentionOptions) -> Tensor:
    """Attention under a mask that says what is seen (its window included); every query must see a key.

    Args:
        q: `[R, N, L, D]`; k: `[R, K, M, D]`; v: `[R, K, M, E]`; mask: bool, broadcast to `[R, N, L, M]`.

    Returns:
        `[R, N, L, E]`.
    """
    if scores.is_plain:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, dim=1) if share > 1 else x for x in (k, v))
    logits = (q @ k.transpose(-1, -2)) * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    logits = logits.masked_fill(~mask, float("-inf"))
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if scores.sinks is not None:
        sinks = scores.sinks.to(wide.dtype)[:, None, None].expand(*wide.shape[:-1], 1)
        wide = torch.cat((wide, sinks), dim=-1)
    weights = torch.softmax(wide, dim=-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v
