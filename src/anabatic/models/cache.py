"""Keys and values of running requests, in blocks of tokens, allocated once; and the plan of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabatic.device.attention import Scores
from anabatic.device.cached import Cached, Span
from anabatic.device.ops import for_device
from anabatic.device.segments import Segments
from anabatic.device.table import DEVICES
from anabatic.device.transfer import send


def head_sizes(config: Any) -> tuple[int, int, int]:
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
    heads, wide, narrow = head_sizes(config)
    return int(config.num_hidden_layers * (heads // parts) * (wide + narrow) * dtype.itemsize)


@dataclass
class Row:
    """New tokens of one request.

    Attributes:
        tokens: they, one or more.
        start: tokens before them, which are in the cache.
        blocks: of the request, in order, with room for the new tokens.
        runs: the same as `(first, count)` of consecutive blocks.
        wanted: logits after the last one are asked for.
        adapter: place of the request's adapter among those loaded; -1: none.
        length: tokens of the request so far, of which these may be a piece; 0: up to the last of these.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    runs: Sequence[Sequence[int]]
    wanted: bool = True
    adapter: int = -1
    length: int = 0


class Cache:
    """Blocks of `size` tokens each; `parts` ranks hold the heads together.

    Attributes:
        keys: `[layers, tokens, K, D]`; values: `[layers, tokens, K, E]`.
        now: the plan of the running forward pass.
        look: called at every layer; what it raises ends the pass.
    """

    def __init__(
        self, config: Any, blocks: int, size: int, device: torch.device, dtype: torch.dtype, parts: int = 1
    ) -> None:
        heads, wide, narrow = head_sizes(config)
        shape = (config.num_hidden_layers, blocks * size, heads // parts)
        self.keys = torch.zeros(*shape, wide, device=device, dtype=dtype)
        self.values = torch.zeros(*shape, narrow, device=device, dtype=dtype)
        self._layers = list(zip(self.keys, self.values, strict=True))
        self.blocks, self.size = blocks, size
        self.now: Pass
        self.look: Callable[[], None] = lambda: None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Keep the new keys and values, and return the attention `[T, N, E]` of all new tokens.

        Args:
            q: `[T, N, D]`; k: `[T, K, D]`; v: `[T, K, E]`, in the order of the plan.
        """
        self.look()
        now = self.now
        now.attended += 1
        keys, values = self._layers[layer]
        keys.index_copy_(0, now.write, k.to(keys.dtype))
        values.index_copy_(0, now.write, v.to(values.dtype))
        if now.fresh is None and now.cached is not None:
            return now.cached.attend(q.to(keys.dtype), keys, values, scores).to(q.dtype)
        outs = []
        if now.fresh is not None:
            n = now.fresh.cu_seqlens[-1]
            outs.append(for_device(q.device.type).attention(q[:n], k[:n], v[:n], now.fresh, scores))
        if now.cached is not None:
            n = q.shape[0] - sum(now.cached.counts)
            outs.append(now.cached.attend(q[n:].to(keys.dtype), keys, values, scores).to(q.dtype))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class Pass:
    """One forward pass over new tokens of many requests, side by side without padding: whole beginnings first, then
    further pieces of prompts, then single tokens.

    Attributes:
        input_ids, position_ids: `[1, T]`; write: `[T]`, places in the cache.
        last: `[n]`, the tokens after which logits are wanted, in the order of the given rows.
        fresh: beginnings, which see nothing of the cache; None: there are none.
        cached: the others.
        attended: layers that have used the plan.
        adapters: place of each row's adapter and the number of its tokens, in the order of the tokens.
        lengths: tokens of each row's request, and the number of the new ones, in the order of the tokens.
    """

    def __init__(self, rows: Sequence[Row], cache: Cache) -> None:
        device, size = cache.keys.device, cache.size
        order = sorted(
            range(len(rows)), key=lambda at: (rows[at].start > 0, len(rows[at].tokens) == 1, rows[at].adapter)
        )
        self.attended = 0
        ids: list[int] = []
        positions: list[int] = []
        write: list[int] = []
        ends = [0] * len(rows)
        self.adapters: list[tuple[int, int]] = []
        self.lengths: list[tuple[int, int]] = []
        borders, spans = [0], []
        for at in order:
            row = rows[at]
            ids += row.tokens
            end = row.start + len(row.tokens)
            positions += range(row.start, end)
            write += [row.blocks[place // size] * size + place % size for place in range(row.start, end)]
            ends[at] = len(ids) - 1
            self.adapters.append((row.adapter, len(row.tokens)))
            self.lengths.append((row.length or end, len(row.tokens)))
            if row.start:
                spans.append(Span(row.start, len(row.tokens), row.runs))
            else:
                borders.append(len(ids))
        wanted = [end for row, end in zip(rows, ends, strict=True) if row.wanted]
        flat = send(torch.tensor(ids + positions + write + wanted), device)  # one copy to the device, not four
        self.input_ids, self.position_ids, self.write, self.last = flat.split([len(ids)] * 3 + [len(wanted)])
        self.input_ids, self.position_ids = self.input_ids[None], self.position_ids[None]
        self.fresh = Segments(borders, device) if len(borders) > 1 else None
        together = DEVICES[device.type].read_cache_together
        self.cached = Cached(spans, size, device, together) if spans else None
