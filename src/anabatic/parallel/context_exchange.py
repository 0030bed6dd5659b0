"""Context parallelism by Ulysses (arXiv 2309.14509, section 3).

Between layers a rank has some tokens of a batch with all heads; for attention an all-to-all gives it all tokens of some
heads, and a second one takes the outputs back.

Shapes: `C` ranks, `t` tokens of this rank, `T` of all, `N` query heads, `K` key/value heads (N a multiple of K), `D`
head size of queries and keys, `E` of values. `K'` is the least common multiple of K and C: with fewer key heads than
ranks, or a number that C does not divide, each key head is sent to all ranks that have queries of it, and no further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.device.attention import Attention, AttentionOptions, GatherRows, PackedSegments
from anabatic.device.device import send_to_device
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.token_split import TokenSplit


class _AllToAll(torch.autograd.Function):
    """Sends a part of a flat tensor to each rank; the gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: RankGroup) -> Tensor:
        ctx.counts, ctx.group = (sent, received), group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.counts
        return _exchange(grads[0].contiguous(), received, sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: RankGroup) -> Tensor:
    out = x.new_empty(sum(received))
    if len({*sent, *received}) == 1:
        dist.all_to_all_single(out, x, group=group.process_group)
    else:
        dist.all_to_all_single(out, x, list(received), list(sent), group=group.process_group)
    return out


def exchange_flat(x: Tensor, sent: Sequence[int], received: Sequence[int], group: RankGroup) -> Tensor:
    """Send the first `sent[0]` elements of a flat tensor to rank 0, the next to rank 1, ...; return what they send."""
    out: Tensor = _AllToAll.apply(x, sent, received, group)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(parts: Sequence[Tensor], split: TokenSplit, places: Tensor | None = None) -> list[Tensor]:
    """Return this rank's share of the heads of all tokens; one all-to-all for all `parts`.

    Args:
        parts: `[t, heads, size]`, the heads of each a multiple of `C`.
        places: rows to return of those that come, int64 `[T]`; None: all, from the first rank to the last.

    Returns:
        `[T, heads / C, size]` of each part.
    """
    ranks, own = split.group.size, parts[0].shape[0]
    shapes = [(part.shape[1] // ranks, part.shape[2]) for part in parts]
    widths = [heads * size for heads, size in shapes]
    by_rank = torch.cat([part.reshape(own, ranks, -1) for part in parts], dim=2).transpose(0, 1)
    width = sum(widths)
    sent, received = [own * width] * ranks, [count * width for count in split.counts]
    flat = exchange_flat(by_rank.reshape(-1), sent, received, split.group)
    rows = flat.view(-1, width)
    if places is not None:
        rows = GatherRows.apply(rows, places)  # type: ignore[no-untyped-call]
    columns = rows.split(widths, dim=1)
    return [x.unflatten(1, shape) for x, shape in zip(columns, shapes, strict=True)]


def scatter_tokens(x: Tensor, split: TokenSplit) -> Tensor:
    """Take back what `gather_tokens` has given: `[T, n, size]` of this rank's `n` heads -> `[t, C n, size]`."""
    ranks, own = split.group.size, split.counts[split.group.rank]
    heads, size = x.shape[1:]
    sent, received = [count * heads * size for count in split.counts], [own * heads * size] * ranks
    flat = exchange_flat(x.reshape(-1), sent, received, split.group)
    return flat.view(ranks, own, heads, size).transpose(0, 1).contiguous().view(own, ranks * heads, size)


class TokenExchange:
    """What both ways of attention share: layers that read all tokens in their order, with a share of the heads.

    Attributes:
        split: whose tokens are whose.
        rank, ranks: number of this rank, and how many there are.
    """

    def __init__(self, split: TokenSplit) -> None:
        self.split, self.rank, self.ranks = split, split.group.rank, split.group.size
        self._order: tuple[Tensor, Tensor] | None = None

    def count_own(self, cu_seqlens: Sequence[int]) -> list[tuple[int, int]]:
        """Return length and number of tokens of each run of a segment on this rank, in the order of its tokens."""
        return self.split.count_own(cu_seqlens)

    def gather_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """As `gather_tokens`, with the tokens in the order of the batch."""
        return gather_tokens(parts, self.split, self._find_order(parts[0].device)[1] if self.split.pieces > 1 else None)

    def scatter_heads(self, x: Tensor) -> Tensor:
        """Take back what `gather_heads` has given: `[T, n, size]` of this rank's `n` heads -> `[t, C n, size]`."""
        if self.split.pieces > 1:
            x = GatherRows.apply(x, self._find_order(x.device)[0])  # type: ignore[no-untyped-call]
        return scatter_tokens(x, self.split)

    def _find_order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows of the batch from the first rank to the last, and the inverse of that order."""
        if self._order is None:
            order = self.split.list_rows()
            self._order = send_to_device(order, device), send_to_device(order.argsort(), device)
        return self._order


class HeadExchange(TokenExchange):
    """Ulysses' exchange of one batch, as attention calls it (`device.attention.Exchange`); a rank has one run of it."""

    gathers_heads = True

    def _repeats(self, key_heads: int) -> int:
        """Return `K' / K`."""
        return math.lcm(key_heads, self.split.group.size) // key_heads

    def _repeat(self, x: Tensor) -> Tensor:
        """`[t, K, size]` -> `[t, K', size]`."""
        times = self._repeats(x.shape[1])
        return x if times == 1 else x.unsqueeze(2).expand(-1, -1, times, -1).flatten(1, 2)

    def gather(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[t, N, D]`, `[t, K, D]`, `[t, K, E]` -> `[T, N / C, D]`, `[T, K' / C, D]`, `[T, K' / C, E]`."""
        queries, keys, values = gather_tokens([q, self._repeat(k), self._repeat(v)], self.split)
        return queries, keys, values

    def scatter(self, out: Tensor) -> Tensor:
        """`[T, N / C, E]` -> `[t, N, E]`."""
        return scatter_tokens(out, self.split)

    def gather_gradient(self, grad: Tensor) -> Tensor:
        """Gradient of `scatter`: `[t, N, E]` -> `[T, N / C, E]`."""
        return gather_tokens([grad], self.split)[0]

    def scatter_gradients(self, joint: Tensor, d_v: Tensor, key_heads: int) -> tuple[Tensor, Tensor]:
        """Gradient of `gather`, for values of the size of the keys.

        Args:
            joint: of queries and keys, `[T, N / C + K' / C, D]`; d_v: `[T, K' / C, D]`.
            key_heads: `K`.

        Returns:
            `[t, N + K, D]` and `[t, K, D]`.
        """
        ranks, keys = self.split.group.size, d_v.shape[1]
        by_rank = scatter_tokens(torch.cat((joint, d_v), dim=1), self.split).unflatten(1, (ranks, -1))
        queries, *found = (x.flatten(1, 2) for x in by_rank.split([joint.shape[1] - keys, keys, keys], dim=2))
        if self._repeats(key_heads) > 1:
            found = [x.unflatten(1, (key_heads, -1)).sum(2) for x in found]
        return torch.cat((queries, found[0]), dim=1), found[1].contiguous()

    def attend(
        self,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: PackedSegments,
        options: AttentionOptions,
    ) -> Tensor:
        """Return attention of this rank's tokens, `[t, N, E]`, by that of all tokens with its share of the heads."""
        if options.sinks is not None:
            group = self.split.group
            options = options._replace(sinks=options.sinks.chunk(group.size)[group.rank])
        q, k, v = self.gather(q, k, v)
        return self.scatter(attention(q, k, v, segments, options))
