"""Blocks of attention and their merging against one softmax over all keys in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anabatic.cpu_speed.cpu_blocks import CPU_BLOCKS
from anabatic.device.attention import PackedSegments
from anabatic.device.block_attention import REFERENCE_BLOCKS, BlockOps, merge_block

OPS = {"reference": REFERENCE_BLOCKS, "cpu": CPU_BLOCKS}
SCALE = 0.7


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def slow(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, head by head."""
    outs, sums = [], []
    for head in range(q.shape[1]):
        at = head // (q.shape[1] // k.shape[1])
        scores = (q[:, head] @ k[:, at].t() * SCALE).masked_fill(~mask, float("-inf"))
        sums.append(scores.logsumexp(1))
        outs.append(scores.softmax(1) @ v[:, at])
    return torch.stack(outs, 1), torch.stack(sums, 1)


def causal_mask(borders: list[int]) -> Tensor:
    ids = torch.cat([torch.full((end - start,), start) for start, end in zip(borders, borders[1:], strict=False)])
    return (ids[:, None] == ids[None, :]).tril()


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("borders", [[0, 9], [0, 2, 9, 12, 40, 41, 60], None])
@pytest.mark.parametrize("name", OPS)
def test_a_block_is_softmax_attention(name: str, borders: list[int] | None, key_heads: int) -> None:
    ops = OPS[name]
    queries = borders[-1] if borders else 5
    keys = borders[-1] if borders else 7
    q, k, v = draw(queries, 4, 8), draw(keys, key_heads, 8), draw(keys, key_heads, 8) + 1
    mask = causal_mask(borders) if borders else torch.ones(queries, keys, dtype=torch.bool)
    segments = PackedSegments(borders, q.device) if borders else None
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = slow(*wide, mask)
    out, lse = ops.forward(q, k, v, segments, SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-4)
    grad = draw(queries, 4, 8) - 0.3
    found = ops.backward(grad, q, k, v, out, lse, segments, SCALE)
    for mine, theirs in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", OPS)
def test_two_blocks_are_merged_in_both_passes(name: str) -> None:
    """Queries that see their own tokens causally and 6 earlier ones, with scores far apart."""
    ops: BlockOps = OPS[name]
    q, k, v = draw(5, 4, 8) * 5, draw(11, 2, 8) * 5, draw(11, 2, 8)
    mask = torch.cat((torch.ones(5, 6, dtype=torch.bool), causal_mask([0, 2, 5])), 1)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = slow(*wide, mask)
    segments = PackedSegments([0, 2, 5], q.device)
    out, lse = (x.contiguous() for x in ops.forward(q, k[6:], v[6:], segments, SCALE))
    merge_block(out, lse, *ops.forward(q, k[:6], v[:6], None, SCALE))
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-4)
    grad = draw(5, 4, 8)
    near = ops.backward(grad, q, k[6:], v[6:], out, lse, segments, SCALE)
    far = ops.backward(grad, q, k[:6], v[:6], out, lse, None, SCALE)
    found = (near[0] + far[0], torch.cat((far[1], near[1])), torch.cat((far[2], near[2])))
    for mine, theirs in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-3, atol=1e-4)
