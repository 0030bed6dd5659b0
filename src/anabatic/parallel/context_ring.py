"""Context parallelism by a ring (arXiv 2310.01889): queries stay, keys and values travel, results are merged.

The packed batch is cut into two pieces for each rank (`TokenSplit` with `pieces=2`). Inside a piece, attention is the
usual one of packed segments. Between two pieces, the queries of a document in the later one see all its keys in the
earlier one, so such a pair needs no mask. In round `d`, every rank sends the keys that the rank `d` further needs, and
nothing else; a round in which no document crosses is left out. Gradients of keys travel back in the backward pass, in
which keys are sent once more.

Shapes: `t` tokens of this rank, `N` query heads, `K` key/value heads, `D` head size of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.core.errors import DataError
from anabatic.device.attention import Attention, AttentionOptions, PackedSegments
from anabatic.device.block_attention import BlockOps, merge_block
from anabatic.parallel.context_exchange import TokenExchange
from anabatic.parallel.token_split import TokenSplit

Rows = tuple[int, int]
"""First row and end."""


class RingPair(NamedTuple):
    """Rows of one document in two pieces of a batch: every query sees every key."""

    query_piece: int
    key_piece: int
    queries: Rows
    keys: Rows


def list_pairs(cu_seqlens: Sequence[int], borders: Sequence[int]) -> list[RingPair]:
    """Return the pairs of pieces with a document in common; `borders` are those of the pieces."""
    pairs = []
    for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        parts = [
            (piece, (max(start, first), min(end, stop)))
            for piece, (first, stop) in enumerate(zip(borders, borders[1:], strict=False))
            if max(start, first) < min(end, stop)
        ]
        for at, (later, queries) in enumerate(parts):
            pairs += [RingPair(later, earlier, queries, keys) for earlier, keys in parts[:at]]
    return pairs


@dataclass(frozen=True)
class RingRound:
    """What this rank sends, gets and computes for ranks at one distance.

    Attributes:
        distance: keys go to the rank with this distance; 0: none are sent, the blocks are of this rank's own keys.
        sent: this rank's rows of the keys that go.
        received: number of rows that come.
        blocks: rows of queries here, and of keys: as they come, with distance 0 as they lie here.
    """

    distance: int
    sent: list[slice]
    received: int
    blocks: list[tuple[slice, slice]]


class RingPlan:
    """What a rank computes and sends for one packed batch; made on the host, without communication.

    Attributes:
        segments: of this rank's tokens, cut at the borders of its pieces.
        rounds: in which something is done on any rank.
    """

    def __init__(self, cu_seqlens: Sequence[int], split: TokenSplit, device: torch.device) -> None:
        self.split = split
        pieces = split.list_pieces(split.group.rank)
        runs = split.list_runs(split.group.rank)
        ends = [sum(end - start for start, end in runs[: at + 1]) for at in range(len(runs))]
        self._offsets = {
            piece: end - stop for piece, end, (_, stop) in zip(pieces, ends, runs, strict=True)
        }  # what turns a row of the batch into one of this rank
        cut = {0, *ends}
        for piece, (first, stop) in zip(pieces, runs, strict=True):
            cut |= {border + self._offsets[piece] for border in cu_seqlens if first < border < stop}
        self.segments = PackedSegments(sorted(cut), device)
        by_distance: dict[int, list[RingPair]] = {}
        for pair in list_pairs(cu_seqlens, split.borders):
            distance = (split.find_owner(pair.query_piece) - split.find_owner(pair.key_piece)) % split.group.size
            by_distance.setdefault(distance, []).append(pair)
        self.rounds = [self._plan_round(distance, by_distance[distance]) for distance in sorted(by_distance)]

    def _local(self, piece: int, rows: Rows) -> slice:
        return slice(rows[0] + self._offsets[piece], rows[1] + self._offsets[piece])

    def _plan_round(self, distance: int, pairs: list[RingPair]) -> RingRound:
        split, rank = self.split, self.split.group.rank
        here = [pair for pair in pairs if split.find_owner(pair.query_piece) == rank]
        if distance == 0:
            blocks = [(self._local(p.query_piece, p.queries), self._local(p.key_piece, p.keys)) for p in here]
            return RingRound(0, [], 0, blocks)
        sent = sorted({(p.key_piece, p.keys) for p in pairs if split.find_owner(p.key_piece) == rank})
        places: dict[tuple[int, Rows], slice] = {}
        received = 0
        for part in sorted({(p.key_piece, p.keys) for p in here}):
            count = part[1][1] - part[1][0]
            places[part] = slice(received, received + count)
            received += count
        blocks = [(self._local(p.query_piece, p.queries), places[p.key_piece, p.keys]) for p in here]
        return RingRound(distance, [self._local(*part) for part in sent], received, blocks)


def _send(rows: Tensor, received: int, distance: int, split: TokenSplit) -> Tensor:
    """Send `[n, width]` to the rank `distance` further; return the rows of the rank as far back."""
    ranks, rank = split.group.size, split.group.rank
    counts_in, counts_out = [0] * ranks, [0] * ranks
    counts_in[(rank - distance) % ranks], counts_out[(rank + distance) % ranks] = received, len(rows)
    out = rows.new_empty(received, rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), counts_in, counts_out, group=split.group.process_group)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, ops: BlockOps, scale: float) -> Tensor:
        out, lse = ops.forward(q, k, v, plan.segments, scale)
        out, lse = out.float().contiguous(), lse.contiguous()
        for round_plan in plan.rounds:
            keys, values = _fetch(k, v, round_plan, plan.split)
            for queries, rows in round_plan.blocks:
                block, block_lse = ops.forward(q[queries], keys[rows], values[rows], None, scale)
                merge_block(out[queries], lse[queries], block, block_lse)
        narrow = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, narrow, lse)
        ctx.plan, ctx.ops, ctx.scale = plan, ops, scale
        return narrow

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, ops, scale, grad = ctx.plan, ctx.ops, ctx.scale, grads[0].contiguous()
        totals = [x.float() for x in ops.backward(grad, q, k, v, out, lse, plan.segments, scale)]
        d_q, d_k, d_v = totals
        for round_plan in plan.rounds:
            keys, values = _fetch(k, v, round_plan, plan.split)
            d_keys, d_values = d_k, d_v
            if round_plan.distance:
                d_keys, d_values = (torch.zeros_like(x, dtype=torch.float32) for x in (keys, values))
            for queries, rows in round_plan.blocks:
                found = ops.backward(
                    grad[queries], q[queries], keys[rows], values[rows], out[queries], lse[queries], None, scale
                )
                for total, part in zip((d_q[queries], d_keys[rows], d_values[rows]), found, strict=True):
                    total.add_(part)
            if round_plan.distance:
                _give_back(d_keys, d_values, (d_k, d_v), round_plan, plan.split)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None, None


def _fetch(k: Tensor, v: Tensor, round_plan: RingRound, split: TokenSplit) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a round, each `[m, K, D]`."""
    if round_plan.distance == 0:
        return k, v
    own = torch.stack((k, v), dim=1)
    parts = [own[rows] for rows in round_plan.sent]
    rows = torch.cat(parts) if parts else own[:0]
    found = _send(rows.flatten(1), round_plan.received, round_plan.distance, split)
    keys, values = found.unflatten(1, own.shape[1:]).unbind(1)
    return keys, values


def _give_back(
    d_keys: Tensor, d_values: Tensor, totals: tuple[Tensor, Tensor], round_plan: RingRound, split: TokenSplit
) -> None:
    """Send the gradients of a round's keys back, and add those that come to this rank's."""
    count = sum(rows.stop - rows.start for rows in round_plan.sent)
    found = _send(torch.stack((d_keys, d_values), dim=1).flatten(1), count, -round_plan.distance, split)
    offset = 0
    for rows in round_plan.sent:
        parts = found[offset : offset + rows.stop - rows.start].unflatten(1, (2, *d_keys.shape[1:])).unbind(1)
        for total, part in zip(totals, parts, strict=True):
            total[rows].add_(part)
        offset += rows.stop - rows.start


class RingExchange(TokenExchange):
    """The ring of one batch, as attention calls it (`device.attention.Exchange`).

    Args:
        cu_seqlens: borders of the segments of the whole batch.
        split: whose tokens are whose, two pieces of each rank.
        find_ops: operators for tensors on a type of device.
    """

    gathers_heads = False

    def __init__(
        self, cu_seqlens: Sequence[int], split: TokenSplit, device: torch.device, find_ops: Callable[[str], BlockOps]
    ) -> None:
        super().__init__(split)
        self._longest = max(end - start for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False))
        self._plan, self._find_ops = RingPlan(cu_seqlens, split, device), find_ops

    def attend(
        self,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: PackedSegments,
        options: AttentionOptions,
    ) -> Tensor:
        """Return attention of this rank's tokens: q `[t, N, D]`, k and v `[t, K, D]` -> `[t, N, D]`.

        Raises:
            DataError: the layer is not plain causal attention.
        """
        sees_all = options.window is None or options.window >= self._longest
        if not options.is_plain or not segments.is_causal or not sees_all or v.shape[-1] != q.shape[-1]:
            raise DataError(
                "the ring of parallel.context computes causal attention without a window, a cap, sinks or values of"
                " another size than keys",
                "use --parallel.context-method ulysses, with a parallel.context that divides the attention heads",
            )
        out: Tensor = _RingAttention.apply(q, k, v, self._plan, self._find_ops(q.device.type), options.scale)  # type: ignore[no-untyped-call]
        return out
