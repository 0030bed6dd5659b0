"""Attention of new tokens over keys and values in a paged KV cache, in plain torch.

Shapes: `S` tokens of a layer's cache, `N` query heads, `K` key/value heads, `D` head size of queries and keys, `E` of
values, `L` tokens that a row attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.device.attention import AttentionOptions, attend_masked
from anabatic.device.device import send_to_device


class CachedSpan(NamedTuple):
    """Cache position of the tokens of one row.

    Attributes:
        start: number of tokens already in the cache.
        num_new: number of new tokens, which this forward pass writes.
        block_runs: `(first block, blocks)` of consecutive blocks, in token order.
    """

    start: int
    num_new: int
    block_runs: Sequence[Sequence[int]]


class CachedAttention:
    """Plan for rows that attend to cached tokens, built on the host, so that no layer waits for the device.

    Args:
        spans: rows, those with several new tokens first.
        block_size: tokens per block.
        device: device of the cache.
        batched: pad rows with one new token to the longest and compute them in one call; else compute each row
            separately, without a copy if its blocks are consecutive. The device table has the faster choice.
    """

    def __init__(self, spans: Sequence[CachedSpan], block_size: int, device: torch.device, batched: bool) -> None:
        self._size, self._device = block_size, device
        single_spans = [span for span in spans if span.num_new == 1]
        self._separate_rows = list(spans if not batched else spans[: len(spans) - len(single_spans)])
        self._padded_rows = single_spans if batched else []
        self.token_counts = [span.num_new for span in self._separate_rows] + (
            [len(single_spans)] if self._padded_rows else []
        )
        self._num_multi_token = sum(span.num_new > 1 for span in self._separate_rows)
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        if self._padded_rows:
            self._lengths = np.array([span.start + 1 for span in single_spans])
            self._width = -(-int(self._lengths.max()) // block_size) * block_size
            self._blocks = send_to_device(torch.from_numpy(self._build_block_table()), device)

    def _build_block_table(self) -> np.ndarray:
        """Return the blocks of the padded rows, `[R * M]`; missing blocks are 0 and hidden by the mask."""
        table = np.zeros((len(self._padded_rows), self._width // self._size), dtype=np.int64)
        for row, span in enumerate(self._padded_rows):
            column = 0
            for first, blocks in span.block_runs:
                end = min(column + blocks, table.shape[1])
                table[row, column:end] = np.arange(first, first + end - column)
                column = end
        return table.reshape(-1)

    def compute_attention(self, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """q `[T, N, D]`, a layer's full cache `[S, K, D]` and `[S, K, E]` -> `[T, N, E]`."""
        if not self._num_multi_token and not self._padded_rows:
            return self._attend_singles(0, q, keys, values, options)
        parts = q.split(self.token_counts)
        num_multi = self._num_multi_token
        outputs = [self._attend_row(row, parts[row], keys, values, options) for row in range(num_multi)]
        if num_multi < len(self._separate_rows):
            outputs.append(self._attend_singles(num_multi, q, keys, values, options))
        if self._padded_rows:
            outputs.append(self._attend_padded(parts[-1], keys, values, options))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_singles(
        self, first_row: int, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Compute rows with one new token one by one over their own keys, without padding or copies."""
        spans = self._separate_rows[first_row:]
        q = q[-len(spans) :] if first_row else q
        if not options.is_plain:
            parts = q.split(1)
            return torch.cat(
                [
                    self._attend_row(first_row + offset, parts[offset], keys, values, options)
                    for offset in range(len(spans))
                ]
            )
        # Query heads that share a key head become its queries: keys are not repeated, and no mask is needed.
        parts = q.reshape(len(spans), keys.shape[1], -1, q.shape[2]).chunk(len(spans))
        outputs = []
        for span, part in zip(spans, parts, strict=True):
            length = span.start + 1
            k, v = self._read_tokens(keys, span, length), self._read_tokens(values, span, length)
            if options.window is not None and length > options.window:
                k, v = k[..., length - options.window :, :], v[..., length - options.window :, :]
            outputs.append(F.scaled_dot_product_attention(part, k, v, scale=options.scale))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1, 2)

    def _attend_row(self, row: int, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """Compute one row under a mask."""
        span = self._separate_rows[row]
        k, v = (self._read_tokens(x, span, span.start + span.num_new) for x in (keys, values))
        mask = self._row_mask(row, span, options.window)
        return attend_masked(q.transpose(0, 1).unsqueeze(0), k, v, mask, options).squeeze(0).transpose(0, 1)

    def _read_tokens(self, x: Tensor, span: CachedSpan, length: int) -> Tensor:
        """Return the first `length` tokens of a row, `[1, K, length, D]`: a view if its blocks are consecutive."""
        if len(span.block_runs) == 1:
            _, heads, size = x.shape
            width = heads * size  # a layer's cache is contiguous
            start = x.storage_offset() + span.block_runs[0][0] * self._size * width
            return x.as_strided((1, heads, length, size), (0, size, width, 1), start)  # one view instead of three
        parts = [x[first * self._size : (first + blocks) * self._size] for first, blocks in span.block_runs]
        return torch.cat(parts)[:length].transpose(0, 1).unsqueeze(0)

    def _row_mask(self, row: int, span: CachedSpan, window: int | None) -> Tensor:
        """Return the mask of the new tokens of a row, bool `[1, 1, new, L]`."""
        if (row, window) not in self._masks:
            key_positions = torch.arange(span.start + span.num_new)[None, :]
            query_positions = torch.arange(span.start, span.start + span.num_new)[:, None]
            mask = key_positions <= query_positions
            if window is not None:
                mask &= key_positions > query_positions - window
            self._masks[row, window] = send_to_device(mask[None, None], self._device)
        return self._masks[row, window]

    def _attend_padded(self, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """Compute rows with one new token, padded to the longest."""
        return attend_blocks(q, keys, values, self._blocks, self._size, self._padded_mask(options.window), options)

    def _padded_mask(self, window: int | None) -> Tensor:
        """Return the mask of the padded rows, bool `[R, 1, 1, width]`."""
        if (-1, window) not in self._masks:
            positions = np.arange(self._width)[None, :]
            mask = positions < self._lengths[:, None]
            if window is not None:
                mask &= positions >= self._lengths[:, None] - window
            self._masks[-1, window] = send_to_device(torch.from_numpy(mask[:, None, None, :]), self._device)
        return self._masks[-1, window]


def attend_blocks(
    q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, block_size: int, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute the attention of rows with one new token each over equally many blocks.

    Args:
        q: `[R, N, D]`; keys: a layer's full cache `[S, K, D]`; values: `[S, K, E]`.
        blocks: of all rows in turn, `[R * M]`.
        mask: bool, broadcast to `[R, N, 1, M * block_size]`; hides what a row does not hold.

    Returns:
        `[R, N, E]`.
    """
    k, v = (
        x.unflatten(0, (-1, block_size)).index_select(0, blocks).unflatten(0, (len(q), -1)).flatten(1, 2)
        for x in (keys, values)
    )
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if options.is_plain:
        return attend_masked(q.unflatten(1, (k.shape[1], -1)), k, v, mask, options).flatten(1, 2)
    return attend_masked(q.unsqueeze(2), k, v, mask, options).squeeze(2)
