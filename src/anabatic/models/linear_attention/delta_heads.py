"""Which heads of a layer of the gated delta rule a rank computes.

Queries, keys, values, the convolution of each channel, decays and states belong to a head each, so heads are divided
where attention divides its own: among tensor ranks (`tensor_parallel.py`), and among ranks that share the tokens of a
batch (`parallel/context_exchange.py`), each of which then has all tokens in their order. The convolution and the decays
are whole on every rank, which uses those of its heads.

Shapes: `T` tokens, `K` key heads of size `D`, `V` value heads of size `E`, `C` ranks. `K'` is the least common multiple
of `K` and `C`, as in `context_exchange.py`: C divides V, so K' does, and each rank has V / C value heads with K' / C
copies of the key heads that they read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabatic.device.attention import Exchange
from anabatic.parallel.context_exchange import exchange_flat
from anabatic.parallel.mesh import SINGLE_RANK, RankGroup


class TokenInputs(NamedTuple):
    """What the rule reads of the tokens, before its convolution.

    Attributes:
        mixed: queries, keys and values, `[T, 2 K D + V E]`.
        write: `[T, V]`, beta before its sigmoid; step: `[T, V]`, before the time step's bias.
    """

    mixed: Tensor
    write: Tensor
    step: Tensor


class HeadWeights(NamedTuple):
    """Weights of some heads of a layer.

    Attributes:
        keys, values: `K` and `V`; key_size: `D`.
        convolution: `[2 K D + V E, width]`; bias: `[2 K D + V E]`.
        decay: `A_log`, `[V]`; step_bias: `dt_bias`, `[V]`.
    """

    keys: int
    values: int
    key_size: int
    convolution: Tensor
    bias: Tensor | None
    decay: Tensor
    step_bias: Tensor

    def split_heads(self, x: Tensor, dim: int) -> list[Tensor]:
        """Return queries, keys and values of the channels in dimension `dim`: two dimensions, heads and sizes."""
        width = self.keys * self.key_size
        parts = x.split([width, width, x.shape[dim] - 2 * width], dim)
        return [
            part.unflatten(dim, (heads, -1))
            for part, heads in zip(parts, (self.keys, self.keys, self.values), strict=True)
        ]

    def take(self, rank: int, ranks: int) -> HeadWeights:
        """Return those of a rank's share of the heads."""
        copies = math.lcm(self.keys, ranks) // self.keys

        def take_channels(x: Tensor) -> Tensor:
            q, k, v = self.split_heads(x, 0)
            own = (part.chunk(ranks)[rank] for part in (_repeat(q, 0, copies), _repeat(k, 0, copies), v))
            return torch.cat([part.flatten(0, 1) for part in own])

        return HeadWeights(
            copies * self.keys // ranks,
            self.values // ranks,
            self.key_size,
            take_channels(self.convolution),
            None if self.bias is None else take_channels(self.bias),
            self.decay.chunk(ranks)[rank],
            self.step_bias.chunk(ranks)[rank],
        )


def _repeat(x: Tensor, dim: int, times: int) -> Tensor:
    """Repeat every slice of dimension `dim`."""
    if times == 1:
        return x
    before, after = x.shape[: dim + 1], x.shape[dim + 1 :]
    return x.unsqueeze(dim + 1).expand(*before, times, *after).flatten(dim, dim + 1)


def divide_heads(module: Any, group: RankGroup) -> None:
    """Let a layer compute this rank's share of its heads; its projections are sharded already."""
    module.__dict__["_anabatic_tensor_group"] = group


def get_tensor_group(module: Any) -> RankGroup:
    """Return the ranks that divide the heads of a layer."""
    group: RankGroup = module.__dict__.get("_anabatic_tensor_group", SINGLE_RANK)
    return group


def read_weights(module: Any) -> HeadWeights:
    """Return the weights of a layer's heads; with tensor ranks, of this rank's."""
    whole = HeadWeights(
        module.num_k_heads,
        module.num_v_heads,
        module.head_k_dim,
        module.conv1d.weight.squeeze(1),
        module.conv1d.bias,
        module.A_log,
        module.dt_bias,
    )
    group = get_tensor_group(module)
    return whole if group.size == 1 else whole.take(group.rank, group.size)


def gather_channels(x: Tensor, widths: Sequence[int], group: RankGroup) -> Tensor:
    """Give each tensor rank its heads of a joint projection.

    Qwen3.5's projection of queries, keys and values is sharded by its rows, so that checkpoints stay as they are, but
    a run of rows is not a share of each of the three. The products travel: a rank gets the rest of its heads' channels
    from the ranks that have them.

    Args:
        x: `[T, sum(widths) / ranks]`, this rank's run of channels; widths: of the parts, each a multiple of the ranks.

    Returns:
        `[T, sum(widths) / ranks]`, this rank's share of each part.
    """
    run = sum(widths) // group.size
    runs = [_find_segments(source, widths, group.size) for source in range(group.size)]
    tokens, own = len(x), runs[group.rank]
    # The segments of a run follow each other; one split, whose gradient is one copy.
    order = sorted(range(len(own)), key=lambda number: own[number].start)
    parts = x.t().split([own[number].width for number in order])
    by_target = torch.cat([part for _, part in sorted(zip(order, parts, strict=True), key=lambda pair: pair[0])])
    sent = [tokens * sum(segment.width for segment in own if segment.target == rank) for rank in range(group.size)]
    received = [tokens * sum(segment.width for segment in found if segment.target == group.rank) for found in runs]
    return exchange_flat(by_target.reshape(-1), sent, received, group).view(run, tokens).t()


class _Segment(NamedTuple):
    """Channels that one rank has and another one needs."""

    target: int
    start: int
    width: int


def _find_segments(source: int, widths: Sequence[int], ranks: int) -> list[_Segment]:
    """Return the segments of a rank's run of channels, from the first target to the last."""
    run = sum(widths) // ranks
    first, found = source * run, []
    for target in range(ranks):
        begin = 0
        for width in widths:
            start = max(first, begin + target * width // ranks)
            end = min(first + run, begin + (target + 1) * width // ranks)
            if start < end:
                found.append(_Segment(target, start, end - start))
            begin += width
    return found


def gather_tokens(inputs: TokenInputs, weights: HeadWeights, exchange: Exchange) -> tuple[TokenInputs, HeadWeights]:
    """Return what the rule reads of all tokens of the batch, for this rank's share of the heads, and their weights."""
    copies = math.lcm(weights.keys, exchange.ranks) // weights.keys
    q, k, v = weights.split_heads(inputs.mixed, 1)
    parts = [_repeat(q, 1, copies), _repeat(k, 1, copies), v, inputs.write.unsqueeze(2), inputs.step.unsqueeze(2)]
    *channels, write, step = exchange.gather_heads(parts)
    mixed = torch.cat([part.flatten(1) for part in channels], dim=1)
    return TokenInputs(mixed, write.squeeze(2), step.squeeze(2)), weights.take(exchange.rank, exchange.ranks)
