"""Decode steps as captured graphs: one launch for a step in which every request reads one token.

A graph has fixed shapes. Steps are padded to a few sizes: rows to the next of 1, 2, 4, 8, 16, 24, ..., with copies of
the first row, which write the same values to the same place; blocks of the cache to the next power of two. What differs
between steps lies in one tensor on the device, which the host fills with one copy before it launches the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.core import log
from anabatic.device.attention import AttentionOptions
from anabatic.device.cached_attention import attend_blocks
from anabatic.device.graphs import CapturedGraph, has_graphs
from anabatic.infer.request import Request, TopLogprobs
from anabatic.infer.sampling import sample_tokens
from anabatic.models import forward, rope_scaling
from anabatic.models.kv_cache import CacheRow, KVCache

_MAX_GRAPHS = 64
"""Sizes of steps that are captured; further ones run operator by operator."""


class DecodeGraphs:
    """The graphs of one engine, captured when a size is met for the second time.

    Args:
        model: without adapters in the rows that are run; its weights stay where they are.
        cache: the engine's.

    Attributes:
        refusal: why steps run operator by operator from now on; empty: they need not.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self._graphs: dict[tuple[int, int], _DecodeGraph] = {}
        self._seen: set[tuple[int, int]] = set()
        self.refusal = ""
        if rope_scaling.get_length_limit(model.config) is not None:
            self.refusal = "the model's rotary frequencies depend on lengths, which the host knows"
        if cache.has_states:
            self.refusal = "layers keep a state of each request"

    @classmethod
    def for_device(cls, model: PreTrainedModel, cache: KVCache) -> DecodeGraphs | None:
        """Return the graphs of an engine, or None where the device has none."""
        return cls(model, cache) if has_graphs(model.device) else None

    def run_step(self, rows: Mapping[Request, CacheRow], scaled: bool) -> list[tuple[int, float, TopLogprobs]] | None:
        """Return the next token of each request, as `sample_tokens` does; None: the step is none for a graph."""
        if self.refusal or not all(_is_decode_row(row) for row in rows.values()):
            return None
        size = (
            _round_up_rows(len(rows)),
            _round_up_blocks(max(_count_blocks(row, self._cache) for row in rows.values())),
        )
        graph = self._graphs.get(size) or self._capture(size, list(rows.values()))
        if graph is None:
            return None
        logits, greedy = graph.run(list(rows.values()))
        requests = list(rows)
        if all(_is_greedy(request) for request in requests):
            return [(int(token), chance, []) for token, chance in greedy[: len(rows)].tolist()]
        return sample_tokens(logits[: len(rows)], requests, scaled)

    def _capture(self, size: tuple[int, int], rows: Sequence[CacheRow]) -> _DecodeGraph | None:
        if size not in self._seen:
            self._seen.add(size)
            return None
        if len(self._graphs) >= _MAX_GRAPHS:
            return None
        pool = next(iter(self._graphs.values())).graph.pool if self._graphs else None
        try:
            graph = _DecodeGraph(self._model, self._cache, size, rows, pool)
        except RuntimeError as error:
            self.refusal = str(error).strip().partition("\n")[0]
            log.warn(f"decode steps run operator by operator: a graph cannot be captured ({self.refusal})")
            return None
        if not self._graphs:
            log.debug(f"decode steps are captured as graphs on {self._model.device.type}: one launch a step")
        self._graphs[size] = graph
        return graph


class _StaticPlan:
    """A `ForwardPlan` of fixed shapes: rows of one token each, all of which attend to cached ones.

    Attributes: as those of `ForwardPlan`.
    """

    prefill_segments = None
    pictures = ()

    def __init__(self, size: tuple[int, int], cache: KVCache) -> None:
        rows, blocks = size
        device = cache.keys.device
        self._size, self._block_size = size, cache.block_size
        self._flat = torch.zeros(rows * (4 + blocks), dtype=torch.int64, device=device)
        ids, positions, self.write_slots, self._lengths, self._blocks = self._flat.split([rows] * 4 + [rows * blocks])
        self.input_ids, self.position_ids = ids[None], positions[None]
        self._places = torch.arange(blocks * cache.block_size, device=device)[None, :]
        self._masks: dict[int | None, Tensor] = {}
        self.num_attended_layers = 0
        self.cached_attention = self

    def restart(self) -> None:
        """Forget what the last pass has computed."""
        self._masks.clear()
        self.num_attended_layers = 0

    def fill(self, rows: Sequence[CacheRow]) -> None:
        """Send a step to the device."""
        count, width = self._size
        table = np.zeros((count, 4 + width), dtype=np.int64)
        for index, row in enumerate(rows):
            block = row.blocks[row.start // self._block_size]
            slot = block * self._block_size + row.start % self._block_size
            table[index, :4] = row.tokens[0], row.position, slot, row.start + 1
            held = row.blocks[: row.start // self._block_size + 1]
            table[index, 4 : 4 + len(held)] = held
        table[len(rows) :] = table[0]
        flat = np.concatenate([table[:, :4].T.reshape(-1), table[:, 4:].reshape(-1)])
        self._flat.copy_(torch.from_numpy(flat).pin_memory(), non_blocking=True)

    def compute_attention(self, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """As `CachedAttention.compute_attention`."""
        if options.window not in self._masks:
            mask = self._places < self._lengths[:, None]
            if options.window is not None:
                mask &= self._places >= self._lengths[:, None] - options.window
            self._masks[options.window] = mask[:, None, None, :]
        return attend_blocks(q, keys, values, self._blocks, self._block_size, self._masks[options.window], options)


class _DecodeGraph:
    """The graph of one size."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        size: tuple[int, int],
        rows: Sequence[CacheRow],
        pool: object,
    ) -> None:
        self._plan = _StaticPlan(size, cache)

        def compute() -> tuple[Tensor, ...]:
            self._plan.restart()
            logits = forward.run_plan(model, self._plan, cache)
            values, tokens = logits.max(dim=-1)
            return logits, torch.stack((tokens.float(), values - logits.logsumexp(dim=-1)), dim=1)

        self._plan.fill(rows)
        callback, cache.layer_callback = cache.layer_callback, lambda: None
        try:
            self.graph = CapturedGraph(model.device, compute, pool)
        finally:
            cache.layer_callback = callback

    def run(self, rows: Sequence[CacheRow]) -> tuple[Tensor, ...]:
        """Return the logits, fp32 `[rows of the size, V]`, and the likeliest token of each row with its
        log-probability, `[rows of the size, 2]`: both until the next run."""
        self._plan.fill(rows)
        self.graph.replay()
        return self.graph.outputs


def _is_decode_row(row: CacheRow) -> bool:
    return row.start > 0 and len(row.tokens) == 1 and row.should_return_logits and row.adapter_slot < 0


def _is_greedy(request: Request) -> bool:
    """True where the likeliest token is the answer: nothing changes the logits or asks for more."""
    own = request.sampling
    plain = own.temperature == 0 and not own.top_logprobs and request.constraint is None
    shifts = own.presence_penalty or own.frequency_penalty or own.logit_bias
    return plain and own.repetition_penalty == 1 and not shifts


def _count_blocks(row: CacheRow, cache: KVCache) -> int:
    return row.start // cache.block_size + 1


def _round_up_rows(count: int) -> int:
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8


def _round_up_blocks(count: int) -> int:
    return 1 << (count - 1).bit_length()
