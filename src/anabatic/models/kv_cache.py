"""Paged KV cache of running requests, allocated once, and the plan of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anabatic.device.attention import AttentionOptions, PackedSegments
from anabatic.device.cached_attention import CachedAttention, CachedSpan
from anabatic.device.device import send_to_device
from anabatic.device.ops import get_device_ops
from anabatic.device.table import DEVICES
from anabatic.models.linear_attention.delta_states import (
    LayerStates,
    StatePlan,
    list_attention_layers,
    list_delta_layers,
)

if TYPE_CHECKING:
    from anabatic.models.vision.prompt_pictures import PlacedPictures, PromptPictures


def get_head_sizes(config: Any) -> tuple[int, int, int]:
    """Return key/value heads, head size of keys and head size of values, as in the attention computation.

    Latent attention (DeepSeek-V2, arXiv 2405.04434) has expanded heads, and values smaller than keys.
    """
    if getattr(config, "kv_lora_rank", None):
        return config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, size, size


def bytes_per_token(config: Any, dtype: torch.dtype, num_ranks: int = 1) -> int:
    """Return the bytes of one token in the cache of each of `num_ranks` ranks."""
    heads, key_size, value_size = get_head_sizes(config)
    return int(len(list_attention_layers(config)) * (heads // num_ranks) * (key_size + value_size) * dtype.itemsize)


@dataclass
class CacheRow:
    """New tokens of one request.

    Attributes:
        tokens: one or more new tokens.
        start: number of tokens before them, which are in the cache.
        blocks: blocks of the request, in order, including those for the new tokens.
        block_runs: the same blocks as `(first, count)` of consecutive ones.
        should_return_logits: return logits after the last token.
        adapter_slot: slot of the request's adapter; -1: none.
        total_length: tokens of the request so far, if these are a chunk of them; 0: up to the last of these.
        state_slot: where layers with a state keep the request's.
        pictures: of the request's prompt, which decide its positions.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    block_runs: Sequence[Sequence[int]]
    should_return_logits: bool = True
    adapter_slot: int = -1
    total_length: int = 0
    state_slot: int = 0
    pictures: PromptPictures | None = None

    @property
    def end(self) -> int:
        """Number of tokens up to the last of these."""
        return self.start + len(self.tokens)

    @property
    def position(self) -> int:
        """Position of the first new token, behind the prompt."""
        return self.start + (0 if self.pictures is None else self.pictures.shift)


class KVCache:
    """Blocks of `block_size` tokens each; the heads are divided over `num_ranks` ranks.

    Args:
        config: of the decoder.
        num_requests: that run at once, for layers that keep one state of each.

    Raises:
        DataError: layers with a state would be divided.

    Attributes:
        keys: `[layers, tokens, K, D]`; values: `[layers, tokens, K, E]`, of the layers that attend.
        forward_plan: the plan of the running forward pass.
        layer_callback: called at every layer; an exception ends the pass.
    """

    def __init__(
        self,
        config: Any,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        num_ranks: int = 1,
        num_requests: int = 1,
    ) -> None:
        heads, key_size, value_size = get_head_sizes(config)
        layers = list_attention_layers(config)
        shape = (len(layers), num_blocks * block_size, heads // num_ranks)
        self.keys = torch.zeros(*shape, key_size, device=device, dtype=dtype)
        self.values = torch.zeros(*shape, value_size, device=device, dtype=dtype)
        self._layers = dict(zip(layers, zip(self.keys, self.values, strict=True), strict=True))
        self._states = {
            layer: LayerStates(config, num_requests, device, dtype, num_ranks) for layer in list_delta_layers(config)
        }
        self.num_blocks, self.block_size = num_blocks, block_size
        self.forward_plan: ForwardPlan
        self.layer_callback: Callable[[], None] = lambda: None

    def compute_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Write the new keys and values to the cache, and return the attention `[T, N, E]` of all new tokens.

        Args:
            q: `[T, N, D]`; k: `[T, K, D]`; v: `[T, K, E]`, in the order of the plan.
        """
        self.layer_callback()
        plan = self.forward_plan
        plan.num_attended_layers += 1
        keys, values = self._layers[layer]
        keys.index_copy_(0, plan.write_slots, k.to(keys.dtype))
        values.index_copy_(0, plan.write_slots, v.to(values.dtype))
        if plan.prefill_segments is None and plan.cached_attention is not None:
            return plan.cached_attention.compute_attention(q.to(keys.dtype), keys, values, options).to(q.dtype)
        outputs = []
        if plan.prefill_segments is not None:
            n = plan.prefill_segments.cu_seqlens[-1]
            outputs.append(get_device_ops(q.device.type).attention(q[:n], k[:n], v[:n], plan.prefill_segments, options))
        if plan.cached_attention is not None:
            n = q.shape[0] - sum(plan.cached_attention.token_counts)
            outputs.append(
                plan.cached_attention.compute_attention(q[n:].to(keys.dtype), keys, values, options).to(q.dtype)
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @property
    def has_states(self) -> bool:
        """True when layers keep a state of each request."""
        return bool(self._states)

    def run_states(self, layer: int, read: Callable[[LayerStates], Tensor]) -> Tensor:
        """Return what `read` makes of the states of a layer; it moves them on."""
        self.layer_callback()
        self.forward_plan.num_attended_layers += 1
        states = self._states[layer]
        states.plan = self.forward_plan.get_state_plan()
        return read(states)


class ForwardPlan:
    """Plan of one forward pass over new tokens of many requests, packed without padding: first chunks of prompts, then
    further chunks, then single tokens.

    Attributes:
        input_ids: `[1, T]`; position_ids: `[1, T]`, with pictures `[3, 1, T]`; write_slots: `[T]`, slots in the cache.
        logit_positions: `[n]`, the tokens after which logits are requested, in the order of the given rows.
        prefill_segments: first chunks, which attend to no cached tokens; None: there are none.
        cached_attention: plan of the other rows.
        num_attended_layers: layers that have used the plan.
        adapter_spans: adapter slot and number of tokens of each row, in token order.
        length_plan: length of each row's request, and number of its new tokens, in token order.
        pictures: of the rows that read a prompt with some, where the row begins in the step.
    """

    def __init__(self, rows: Sequence[CacheRow], cache: KVCache) -> None:
        device, block_size = cache.keys.device, cache.block_size
        self._device = device
        order = sorted(
            range(len(rows)),
            key=lambda index: (rows[index].start > 0, len(rows[index].tokens) == 1, rows[index].adapter_slot),
        )
        self.num_attended_layers = 0
        self._rows = [rows[index] for index in order]
        self._state_plan: StatePlan | None = None
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        ends = [0] * len(rows)
        self.adapter_spans: list[tuple[int, int]] = []
        self.length_plan: list[tuple[int, int]] = []
        self.pictures: list[PlacedPictures] = []
        borders, spans = [0], []
        for index in order:
            row = rows[index]
            ids += row.tokens
            end = row.end
            if row.pictures is not None and row.start < row.pictures.length:
                self.pictures.append((len(positions), row.pictures, row.start, end))
            positions += range(row.position, row.position + len(row.tokens))
            slots += [
                row.blocks[position // block_size] * block_size + position % block_size
                for position in range(row.start, end)
            ]
            ends[index] = len(ids) - 1
            self.adapter_spans.append((row.adapter_slot, len(row.tokens)))
            self.length_plan.append((row.total_length or end, len(row.tokens)))
            if row.start:
                spans.append(CachedSpan(row.start, len(row.tokens), row.block_runs))
            else:
                borders.append(len(ids))
        logit_positions = [end for row, end in zip(rows, ends, strict=True) if row.should_return_logits]
        axes = self._make_axes(positions) if self.pictures else positions
        flat = send_to_device(
            torch.tensor(ids + axes + slots + logit_positions), device
        )  # one copy to the device instead of four
        self.input_ids, self.position_ids, self.write_slots, self.logit_positions = flat.split(
            [len(ids), len(axes), len(slots), len(logit_positions)]
        )
        self.input_ids, self.position_ids = self.input_ids[None], self.position_ids.view(-1, 1, len(ids)).squeeze(0)
        self.prefill_segments = PackedSegments(borders, device) if len(borders) > 1 else None
        batched = DEVICES[device.type].read_cache_together
        self.cached_attention = CachedAttention(spans, block_size, device, batched) if spans else None

    def _make_axes(self, positions: list[int]) -> list[int]:
        """Return positions in time, then in height, then in width; of a decoder with one axis, one."""
        axes = np.array([positions] * self.pictures[0][1].axes)
        for offset, pictures, start, end in self.pictures:
            axes[:, offset : offset + end - start] = pictures.make_positions(start, end)
        found: list[int] = axes.reshape(-1).tolist()
        return found

    def get_state_plan(self) -> StatePlan:
        """Return the plan that all layers with a state share."""
        if self._state_plan is None:
            slots, starts, counts = zip(
                *((row.state_slot, row.start, len(row.tokens)) for row in self._rows), strict=True
            )
            self._state_plan = StatePlan(slots, starts, counts, self._device)
        return self._state_plan
