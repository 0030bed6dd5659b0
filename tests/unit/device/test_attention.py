"""Attention with windows, capped scores and sinks against a loop over queries, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.device.attention import AttentionOptions, PackedSegments, attend_masked, attention_reference
from anabatic.device.ops import OPS_BY_KERNEL
from unit.device.test_ops import check_same, leaf

CPU = torch.device("cpu")


def slow(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: list[int], scores: AttentionOptions, causal: bool = True
) -> torch.Tensor:
    """Every query and head by itself."""
    share = q.shape[1] // k.shape[1]
    rows = []
    for start, end in zip(borders, borders[1:], strict=False):
        for t in range(start, end):
            first = start if scores.window is None else max(start, t - scores.window + 1)
            last = t + 1 if causal else end if scores.window is None else min(end, t + scores.window)
            heads = []
            for head in range(q.shape[1]):
                logits = (k[first:last, head // share] @ q[t, head]) * scores.scale
                if scores.softcap is not None:
                    logits = scores.softcap * torch.tanh(logits / scores.softcap)
                mass = logits.exp()
                total = mass.sum() + (0 if scores.sinks is None else scores.sinks[head].exp())
                heads.append((mass / total) @ v[first:last, head // share])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("lengths", [[7], [4, 4, 4], [30, 1, 18, 17, 29, 3]])
def test_scores(lengths: list[int], extra: str, window: int | None) -> None:
    check_scores(lengths, extra, window, causal=True)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("extra", ["plain", "both"])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [30, 1, 18, 17, 29, 3]])
def test_both_ways(lengths: list[int], extra: str, window: int | None) -> None:
    check_scores(lengths, extra, window, causal=False)


def check_scores(lengths: list[int], extra: str, window: int | None, causal: bool) -> None:
    """Values and gradients of packed attention are those of the loop."""
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q, k, v = leaf(borders[-1], 4, 8), leaf(borders[-1], 2, 8), leaf(borders[-1], 2, 6)
    sinks = leaf(4) if extra in ("sinks", "both") else None
    scores = AttentionOptions(0.6, window, 2.0 if extra in ("softcap", "both") else None, sinks)
    ours = attention_reference(q, k, v, PackedSegments(borders, CPU, causal), scores)
    check_same(ours, slow(q, k, v, borders, scores, causal), [q, k, v] + ([] if sinks is None else [sinks]))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 12), st.sampled_from([16, 8, 4]), st.booleans()
)
def test_any_lengths_and_windows(lengths: list[int], window: int, value_size: int, causal: bool) -> None:
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q, k, v = leaf(borders[-1], 2, 8), leaf(borders[-1], 1, 8), leaf(borders[-1], 1, value_size)
    scores = AttentionOptions(0.4, window)
    ours = attention_reference(q, k, v, PackedSegments(borders, CPU, causal), scores)
    torch.testing.assert_close(ours, slow(q, k, v, borders, scores, causal))


def test_a_mask_hides_keys() -> None:
    q, k, v = leaf(2, 4, 1, 8), leaf(2, 2, 5, 8), leaf(2, 2, 5, 8)
    mask = torch.tensor([[True, True, False, False, False], [True] * 5])[:, None, None]
    for scores in (AttentionOptions(0.5), AttentionOptions(0.5, softcap=3.0)):
        whole = attend_masked(q, k, v, mask, scores)
        part = attend_masked(q[:1], k[:1, :, :2], v[:1, :, :2], mask[:1, ..., :2], scores)
        torch.testing.assert_close(whole[:1], part)


def test_a_processor_computes_half_formats_in_fp32() -> None:
    q, k, v = (leaf(24, heads, 8).detach().bfloat16().requires_grad_() for heads in (4, 2, 2))
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    plan, scores = PackedSegments([0, 5, 24], CPU), AttentionOptions(0.6)
    with torch.autocast("cpu", torch.bfloat16):  # which would cast fp32 back
        ours = OPS_BY_KERNEL["cpu"].attention(q, k, v, plan, scores)
    expected = attention_reference(*wide, plan, scores)
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, expected.bfloat16())
    grad = torch.randn(24, 4, 8).bfloat16()
    found = torch.autograd.grad(ours, (q, k, v), grad)
    wanted = torch.autograd.grad(expected, wide, grad.float())
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found, wanted, strict=True))
