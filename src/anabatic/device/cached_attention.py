"""Attention of new tokens over keys and values that lie in a cache of blocks, in plain torch.

Shapes: `S` tokens that a layer's cache has room for, `N` query heads, `K` key/value heads, `D` head size of queries and
keys, `E` of values, `L` tokens that a row sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.device.attention import AttentionOptions, attend_masked
from anabatic.device.transfer import send_to_device


class CachedSpan(NamedTuple):
    """Where the tokens of one row lie.

    Attributes:
        start: tokens of it that are in the cache already.
        num_new: new ones, which this forward pass puts there.
        block_runs: `(first block, blocks)` of consecutive blocks, in the order of the tokens.
    """

    start: int
    num_new: int
    block_runs: Sequence[Sequence[int]]


class CachedAttention:
    """The plan of rows that see cached tokens, made on the host: no layer waits for the device.

    Args:
        spans: rows, those with several new tokens first.
        size: tokens of a block.
        device: where the cache is.
        together: rows with one new token are padded to the longest and computed in one call; else each by itself, read
            where it lies when its blocks are consecutive: which of the two is faster the device table says.
    """

    def __init__(self, spans: Sequence[CachedSpan], size: int, device: torch.device, together: bool) -> None:
        self._size, self._device = size, device
        last = [span for span in spans if span.num_new == 1]
        self._separate_rows = list(spans if not together else spans[: len(spans) - len(last)])
        self._padded_rows = last if together else []
        self.token_counts = [span.num_new for span in self._separate_rows] + ([len(last)] if self._padded_rows else [])
        self._num_multi_token = sum(span.num_new > 1 for span in self._separate_rows)
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        if self._padded_rows:
            self._lengths = np.array([span.start + 1 for span in last])
            self._width = -(-int(self._lengths.max()) // size) * size
            self._blocks = send_to_device(torch.from_numpy(self._build_block_table()), device)

    def _build_block_table(self) -> np.ndarray:
        """Blocks of the rows computed together, `[R * M]`; where a row has none, block 0, which its mask hides."""
        table = np.zeros((len(self._padded_rows), self._width // self._size), dtype=np.int64)
        for row, span in enumerate(self._padded_rows):
            at = 0
            for first, blocks in span.block_runs:
                end = min(at + blocks, table.shape[1])
                table[row, at:end] = np.arange(first, first + end - at)
                at = end
        return table.reshape(-1)

    def compute_attention(self, q: Tensor, keys: Tensor, values: Tensor, scores: AttentionOptions) -> Tensor:
        """q `[T, N, D]`, a layer's whole cache `[S, K, D]` and `[S, K, E]` -> `[T, N, E]`."""
        if not self._num_multi_token and not self._padded_rows:
            return self._attend_singles(0, q, keys, values, scores)
        parts = q.split(self.token_counts)
        several = self._num_multi_token
        outs = [self._attend_row(row, parts[row], keys, values, scores) for row in range(several)]
        if several < len(self._separate_rows):
            outs.append(self._attend_singles(several, q, keys, values, scores))
        if self._padded_rows:
            outs.append(self._attend_padded(parts[-1], keys, values, scores))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_singles(self, first: int, q: Tensor, keys: Tensor, values: Tensor, scores: AttentionOptions) -> Tensor:
        """Rows of one new token each, one by one against exactly what each sees: nothing is padded or copied."""
        spans = self._separate_rows[first:]
        q = q[-len(spans) :] if first else q
        if not scores.is_plain:
            parts = q.split(1)
            return torch.cat(
                [self._attend_row(first + at, parts[at], keys, values, scores) for at in range(len(spans))]
            )
        # Query heads of one key head become queries of it: nothing is repeated, and nothing needs a mask.
        parts = q.reshape(len(spans), keys.shape[1], -1, q.shape[2]).chunk(len(spans))
        outs = []
        for span, part in zip(spans, parts, strict=True):
            seen = span.start + 1
            k, v = self._read_tokens(keys, span, seen), self._read_tokens(values, span, seen)
            if scores.window is not None and seen > scores.window:
                k, v = k[..., seen - scores.window :, :], v[..., seen - scores.window :, :]
            outs.append(F.scaled_dot_product_attention(part, k, v, scale=scores.scale))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1, 2)

    def _attend_row(self, row: int, q: Tensor, keys: Tensor, values: Tensor, scores: AttentionOptions) -> Tensor:
        """One row under a mask."""
        span = self._separate_rows[row]
        k, v = (self._read_tokens(x, span, span.start + span.num_new) for x in (keys, values))
        mask = self._row_mask(row, span, scores.window)
        return attend_masked(q.transpose(0, 1).unsqueeze(0), k, v, mask, scores).squeeze(0).transpose(0, 1)

    def _read_tokens(self, x: Tensor, span: CachedSpan, length: int) -> Tensor:
        """The first `length` tokens of a row, `[1, K, length, D]`: where they lie, if their blocks are consecutive."""
        if len(span.block_runs) == 1:
            _, heads, size = x.shape
            width = heads * size  # a layer's cache is contiguous
            start = x.storage_offset() + span.block_runs[0][0] * self._size * width
            return x.as_strided((1, heads, length, size), (0, size, width, 1), start)  # one view instead of three
        parts = [x[first * self._size : (first + blocks) * self._size] for first, blocks in span.block_runs]
        return torch.cat(parts)[:length].transpose(0, 1).unsqueeze(0)

    def _row_mask(self, row: int, span: CachedSpan, window: int | None) -> Tensor:
        """What the new tokens of a row see, bool `[1, 1, new, L]`."""
        if (row, window) not in self._masks:
            seen = torch.arange(span.start + span.num_new)[None, :]
            own = torch.arange(span.start, span.start + span.num_new)[:, None]
            mask = seen <= own
            if window is not None:
                mask &= seen > own - window
            self._masks[row, window] = send_to_device(mask[None, None], self._device)
        return self._masks[row, window]

    def _attend_padded(self, q: Tensor, keys: Tensor, values: Tensor, scores: AttentionOptions) -> Tensor:
        """Rows of one new token each, padded to the longest."""
        rows = len(self._padded_rows)
        k, v = (
            x.unflatten(0, (-1, self._size)).index_select(0, self._blocks).unflatten(0, (rows, -1)).flatten(1, 2)
            for x in (keys, values)
        )
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        mask = self._padded_mask(scores.window)
        if scores.is_plain:
            out = attend_masked(q.unflatten(1, (k.shape[1], -1)), k, v, mask, scores)
            return out.flatten(1, 2)
        return attend_masked(q.unsqueeze(2), k, v, mask, scores).squeeze(2)

    def _padded_mask(self, window: int | None) -> Tensor:
        """What the rows computed together see, bool `[R, 1, 1, width]`."""
        if (-1, window) not in self._masks:
            place = np.arange(self._width)[None, :]
            mask = place < self._lengths[:, None]
            if window is not None:
                mask &= place >= self._lengths[:, None] - window
            self._masks[-1, window] = send_to_device(torch.from_numpy(mask[:, None, None, :]), self._device)
        return self._masks[-1, window]
