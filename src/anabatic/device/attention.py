"""Attention over packed segments in plain torch: causal or bidirectional, with window, softcap and sinks where models
have them.

Shapes: `T` tokens, `R` segments of a group, `N` query heads, `K` key/value heads (N a multiple of K), `D` head size of
queries and keys, `E` head size of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.device.segments import PackedSegments, PackedTrees


class AttentionOptions(NamedTuple):
    """Options of a layer's attention scores."""

    scale: float
    """Factor on the scores."""
    window: int | None = None
    """A query attends to this many positions, including its own (Mistral, arXiv 2310.06825); without a causal mask, to
    as many after it; None: all."""
    softcap: float | None = None
    """`cap * tanh(score / cap)` (Gemma 2, arXiv 2408.00118, section 2)."""
    sinks: Tensor | None = None
    """One learned score per query head, `[N]`, that takes part in the softmax and has no value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """True for a plain softmax, which fused kernels support."""
        return self.softcap is None and self.sinks is None


def attention_reference(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, options: AttentionOptions) -> Tensor:
    """Compute attention inside each segment: causal, bidirectional or along the paths of a tree. Segments of similar
    length share one call, so there is little padding.

    Right padding needs no mask under a causal mask: no valid query attends to a later key.

    Args:
        q: `[T, N, D]`; k: `[T, K, D]`; v: `[T, K, E]`.
        segments: borders of the segments.

    Returns:
        `[T, N, E]`.
    """
    sizes = [rows * length for _, rows, length in segments.groups]
    # One split: slicing would sum one gradient of all tokens, mostly zeros, per slice.
    parts = zip(*(segments.spread_groups(x).split(sizes) for x in (q, k, v)), strict=True)
    outputs = []
    for index, ((_, rows, length), tensors) in enumerate(zip(segments.groups, parts, strict=True)):
        group_q, group_k, group_v = (x.unflatten(0, (rows, length)).transpose(1, 2) for x in tensors)
        if isinstance(segments, PackedTrees):
            out = attend_masked(group_q, group_k, group_v, segments.build_mask(index, options.window), options)
        else:
            out = (
                _attend_causal(group_q, group_k, group_v, options)
                if segments.is_causal
                else _attend_bidirectional(group_q, group_k, group_v, segments.valid_keys[index], options)
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return segments.gather_packed(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """q `[R, N, L, D]`, k `[R, K, L, D]`, v `[R, K, L, E]` -> `[R, N, L, E]`; with a window the cost is linear in L."""
    length, window = q.shape[2], options.window
    is_windowed = window is not None and window < length
    if options.is_plain and not is_windowed:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    width = window if is_windowed and window is not None else length
    outputs = []
    for start in range(0, length, width):
        first_key, end = max(0, start - width + 1), min(length, start + width)
        row = torch.arange(start, end, device=q.device)[:, None]
        column = torch.arange(first_key, end, device=q.device)[None, :]
        mask = (column <= row) & (column > row - width)
        outputs.append(attend_masked(q[:, :, start:end], k[:, :, first_key:end], v[:, :, first_key:end], mask, options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, valid_keys: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Like `_attend_causal`, but a query also attends to later keys, and never to padding.

    Args:
        valid_keys: bool `[R, 1, 1, L]`, keys that are not padding; None: all. Padded queries attend to valid keys, too,
            so their results are finite; they are not used.
    """
    length = q.shape[2]
    mask = valid_keys
    if options.window is not None and options.window < length:
        positions = torch.arange(length, device=q.device)
        in_window = (positions[:, None] - positions[None, :]).abs() < options.window
        is_self = positions[:, None] == positions[None, :]  # or a padded query would attend to nothing
        mask = in_window if valid_keys is None else (in_window & valid_keys) | is_self
    if mask is None and options.is_plain:
        return F.scaled_dot_product_attention(q, k, v, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1])
    if mask is None:
        mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=q.device)
    return attend_masked(q, k, v, mask, options)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Compute attention under a mask that includes the window; every query must attend to a key.

    Args:
        q: `[R, N, L, D]`; k: `[R, K, M, D]`; v: `[R, K, M, E]`; mask: bool, broadcast to `[R, N, L, M]`.

    Returns:
        `[R, N, L, E]`.
    """
    if options.is_plain:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) if group_size > 1 else x for x in (k, v))
    logits = (q @ k.transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    logits = logits.masked_fill(~mask, float("-inf"))
    upcast = logits if logits.dtype == torch.float64 else logits.float()
    if options.sinks is not None:
        sinks = options.sinks.to(upcast.dtype)[:, None, None].expand(*upcast.shape[:-1], 1)
        upcast = torch.cat((upcast, sinks), dim=-1)
    weights = torch.softmax(upcast, dim=-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v
