"""Keys and values of running requests, in blocks of tokens, allocated once; and the plan of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabatic.device.attention import AttentionOptions
from anabatic.device.cached_attention import CachedAttention, CachedSpan
from anabatic.device.ops import get_device_ops
from anabatic.device.segments import PackedSegments
from anabatic.device.table import DEVICES
from anabatic.device.transfer import send_to_device


def get_head_sizes(config: Any) -> tuple[int, int, int]:
    """Key/value heads, head size of keys, head size of values, as attention sees them.

    Latent attention (DeepSeek-V2, arXiv 2405.04434) is seen with its heads expanded and values smaller than keys.
    """
    if getattr(config, "kv_lora_rank", None):
        return config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, size, size


def bytes_per_token(config: Any, dtype: torch.dtype, parts: int = 1) -> int:
    """Bytes that one token takes in the cache of each of `parts` ranks."""
    heads, wide, narrow = get_head_sizes(config)
    return int(config.num_hidden_layers * (heads // parts) * (wide + narrow) * dtype.itemsize)


@dataclass
class CacheRow:
    """New tokens of one request.

    Attributes:
        tokens: they, one or more.
        start: tokens before them, which are in the cache.
        blocks: of the request, in order, with room for the new tokens.
        block_runs: the same as `(first, count)` of consecutive blocks.
        should_return_logits: logits after the last one are asked for.
        adapter_slot: place of the request's adapter among those loaded; -1: none.
        total_length: tokens of the request so far, of which these may be a piece; 0: up to the last of these.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    block_runs: Sequence[Sequence[int]]
    should_return_logits: bool = True
    adapter_slot: int = -1
    total_length: int = 0


class KVCache:
    """Blocks of `block_size` tokens each; `parts` ranks hold the heads together.

    Attributes:
        keys: `[layers, tokens, K, D]`; values: `[layers, tokens, K, E]`.
        forward_plan: the plan of the running forward pass.
        layer_callback: called at every layer; what it raises ends the pass.
    """

    def __init__(
        self, config: Any, blocks: int, size: int, device: torch.device, dtype: torch.dtype, parts: int = 1
    ) -> None:
        heads, wide, narrow = get_head_sizes(config)
        shape = (config.num_hidden_layers, blocks * size, heads // parts)
        self.keys = torch.zeros(*shape, wide, device=device, dtype=dtype)
        self.values = torch.zeros(*shape, narrow, device=device, dtype=dtype)
        self._layers = list(zip(self.keys, self.values, strict=True))
        self.num_blocks, self.block_size = blocks, size
        self.forward_plan: ForwardPlan
        self.layer_callback: Callable[[], None] = lambda: None

    def compute_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: AttentionOptions) -> Tensor:
        """Keep the new keys and values, and return the attention `[T, N, E]` of all new tokens.

        Args:
            q: `[T, N, D]`; k: `[T, K, D]`; v: `[T, K, E]`, in the order of the plan.
        """
        self.layer_callback()
        now = self.forward_plan
        now.num_attended_layers += 1
        keys, values = self._layers[layer]
        keys.index_copy_(0, now.write_slots, k.to(keys.dtype))
        values.index_copy_(0, now.write_slots, v.to(values.dtype))
        if now.prefill_segments is None and now.cached_attention is not None:
            return now.cached_attention.compute_attention(q.to(keys.dtype), keys, values, scores).to(q.dtype)
        outs = []
        if now.prefill_segments is not None:
            n = now.prefill_segments.cu_seqlens[-1]
            outs.append(get_device_ops(q.device.type).attention(q[:n], k[:n], v[:n], now.prefill_segments, scores))
        if now.cached_attention is not None:
            n = q.shape[0] - sum(now.cached_attention.token_counts)
            outs.append(now.cached_attention.compute_attention(q[n:].to(keys.dtype), keys, values, scores).to(q.dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class ForwardPlan:
    """One forward pass over new tokens of many requests, side by side without padding: whole beginnings first, then
    further pieces of prompts, then single tokens.

    Attributes:
        input_ids, position_ids: `[1, T]`; write_slots: `[T]`, places in the cache.
        logit_positions: `[n]`, the tokens after which logits are wanted, in the order of the given rows.
        prefill_segments: beginnings, which see nothing of the cache; None: there are none.
        cached_attention: the others.
        num_attended_layers: layers that have used the plan.
        adapter_spans: place of each row's adapter and the number of its tokens, in the order of the tokens.
        length_plan: tokens of each row's request, and the number of the new ones, in the order of the tokens.
    """

    def __init__(self, rows: Sequence[CacheRow], cache: KVCache) -> None:
        device, size = cache.keys.device, cache.block_size
        order = sorted(
            range(len(rows)), key=lambda at: (rows[at].start > 0, len(rows[at].tokens) == 1, rows[at].adapter_slot)
        )
        self.num_attended_layers = 0
        ids: list[int] = []
        positions: list[int] = []
        write: list[int] = []
        ends = [0] * len(rows)
        self.adapter_spans: list[tuple[int, int]] = []
        self.length_plan: list[tuple[int, int]] = []
        borders, spans = [0], []
        for at in order:
            row = rows[at]
            ids += row.tokens
            end = row.start + len(row.tokens)
            positions += range(row.start, end)
            write += [row.blocks[place // size] * size + place % size for place in range(row.start, end)]
            ends[at] = len(ids) - 1
            self.adapter_spans.append((row.adapter_slot, len(row.tokens)))
            self.length_plan.append((row.total_length or end, len(row.tokens)))
            if row.start:
                spans.append(CachedSpan(row.start, len(row.tokens), row.block_runs))
            else:
                borders.append(len(ids))
        wanted = [end for row, end in zip(rows, ends, strict=True) if row.should_return_logits]
        flat = send_to_device(
            torch.tensor(ids + positions + write + wanted), device
        )  # one copy to the device, not four
        self.input_ids, self.position_ids, self.write_slots, self.logit_positions = flat.split(
            [len(ids)] * 3 + [len(wanted)]
        )
        self.input_ids, self.position_ids = self.input_ids[None], self.position_ids[None]
        self.prefill_segments = PackedSegments(borders, device) if len(borders) > 1 else None
        together = DEVICES[device.type].read_cache_together
        self.cached_attention = CachedAttention(spans, size, device, together) if spans else None
