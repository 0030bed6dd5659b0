"""Attention over a cache of blocks against a loop over single queries."""

from __future__ import annotations

import math

import pytest
import torch

from anabatic.device.attention import AttentionOptions
from anabatic.device.cached_attention import CachedAttention, CachedSpan

SIZE, HEADS, KEY_HEADS, WIDE, NARROW = 4, 4, 2, 8, 6
SPANS = [
    CachedSpan(6, 3, [(2, 1), (9, 2)]),
    CachedSpan(4, 5, [(5, 3)]),
    CachedSpan(9, 1, [(12, 3)]),
    CachedSpan(1, 1, [(0, 1)]),
    CachedSpan(11, 1, [(1, 1), (16, 2)]),
]
SCORES = {
    "plain": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, window=5),
    "capped": AttentionOptions(0.3, softcap=2.0),
    "sinks": AttentionOptions(0.3, window=3, sinks=torch.linspace(-1, 1, HEADS, dtype=torch.float64)),
}


def reference(q, keys, values, scores):
    """Query by query, head by head."""
    out, at = torch.zeros(q.shape[0], HEADS, NARROW, dtype=torch.float64), 0
    for span in SPANS:
        places = [
            block * SIZE + offset
            for first, n in span.block_runs
            for block in range(first, first + n)
            for offset in range(SIZE)
        ]
        for now in range(span.start, span.start + span.num_new):
            first = 0 if scores.window is None else max(0, now - scores.window + 1)
            seen = places[first : now + 1]
            for head in range(HEADS):
                dots = [float(q[at, head] @ keys[place, head // 2]) * scores.scale for place in seen]
                if scores.softcap:
                    dots = [math.tanh(dot / scores.softcap) * scores.softcap for dot in dots]
                sink = [] if scores.sinks is None else [float(scores.sinks[head])]
                total = sum(math.exp(dot) for dot in [*dots, *sink])
                out[at, head] = sum(math.exp(d) / total * values[p, head // 2] for d, p in zip(dots, seen, strict=True))
            at += 1
    return out


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_rows_see_exactly_their_own_tokens(name, together):
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((11, HEADS, WIDE), (20 * SIZE, KEY_HEADS, WIDE), (20 * SIZE, KEY_HEADS, NARROW))
    )
    plan = CachedAttention(SPANS, SIZE, torch.device("cpu"), together)
    for _ in range(2):  # masks are made once
        found = plan.compute_attention(q, keys, values, SCORES[name])
    torch.testing.assert_close(found, reference(q, keys, values, SCORES[name]))
