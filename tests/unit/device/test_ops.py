"""Every implementation of an operator against a slow reference, forward and gradient, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from anabatic.device import attention, ops
from anabatic.device.attention import PackedSegments


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def check_same(ours: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Equal values, and equal gradients of a random projection."""
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(theirs)
    mine = torch.autograd.grad((ours * weight).sum(), inputs)
    reference = torch.autograd.grad((theirs * weight).sum(), inputs)
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("implementation", [ops.rms_norm_reference, ops.rms_norm])
def test_rms_norm_is_the_formula(implementation) -> None:
    x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    formula = x * weight / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    check_same(implementation(x, weight, 1e-5), formula, [x, weight])


def test_rms_norm_keeps_half_precision_statistics_in_fp32() -> None:
    x = (torch.randn(4, 64) * 300).to(torch.bfloat16)
    ours = ops.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-6)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, ops.rms_norm_reference(x, torch.ones(64, dtype=torch.bfloat16), 1e-6))


@pytest.mark.parametrize("implementation", [ops.rotary_reference, ops.apply_rotary])
def test_rotary_is_a_rotation_of_pairs(implementation) -> None:
    x = leaf(1, 2, 5, 6)
    cos, sin = torch.randn(1, 1, 5, 6, dtype=torch.float64), torch.randn(1, 1, 5, 6, dtype=torch.float64)
    pairs = [x[..., i] * cos[..., i] - x[..., i + 3] * sin[..., i] for i in range(3)]
    pairs += [x[..., i + 3] * cos[..., i + 3] + x[..., i] * sin[..., i + 3] for i in range(3)]
    check_same(implementation(x, cos, sin), torch.stack(pairs, -1), [x])


def slow_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: list[int], scale: float) -> torch.Tensor:
    """Token by token, head by head: softmax over the earlier tokens of the same segment."""
    share = q.shape[1] // k.shape[1]
    rows = []
    for start, end in zip(borders, borders[1:], strict=False):
        for t in range(start, end):
            heads = []
            for head in range(q.shape[1]):
                scores = (k[start : t + 1, head // share] @ q[t, head]) * scale
                heads.append(torch.softmax(scores, 0) @ v[start : t + 1, head // share])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[7], [4, 4, 4], [1, 9, 2], [30, 1, 18, 17, 29, 3]])
def test_attention_sees_only_its_own_segment(lengths: list[int], kv_heads: int) -> None:
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q, k, v = leaf(borders[-1], 4, 8), leaf(borders[-1], kv_heads, 8), leaf(borders[-1], kv_heads, 8)
    segments = PackedSegments(borders, torch.device("cpu"))
    ours = attention.attention_reference(q, k, v, segments, attention.AttentionOptions(0.3))
    check_same(ours, slow_attention(q, k, v, borders, 0.3), [q, k, v])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=30))
def test_segments_move_every_token_there_and_back(lengths: list[int]) -> None:
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    segments = PackedSegments(borders, torch.device("cpu"))
    tokens = torch.arange(borders[-1], dtype=torch.float64).unsqueeze(1).requires_grad_()
    spread = segments.spread_groups(tokens)
    assert spread.shape[0] == sum(rows * length for _, rows, length in segments.groups)
    assert sum(rows for _, rows, _ in segments.groups) == len(lengths)
    back = segments.gather_packed(spread)
    torch.testing.assert_close(back, tokens)
    (gradient,) = torch.autograd.grad(back.sum(), tokens)
    assert bool((gradient == 1).all())


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_linear_cross_entropy_equals_the_plain_loss(rows: int) -> None:
    hidden, weight, labels = leaf(10, 6), leaf(17, 6), torch.randint(0, 17, (10,))
    # float64 inputs: the loss itself is summed in fp32, so compare at that precision
    ours = ops.linear_cross_entropy(hidden, weight, labels, chunk_bytes=rows * 17 * 4)
    theirs = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(ours * 3, [hidden, weight])
    reference = torch.autograd.grad(theirs * 3, [hidden, weight])
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 100])
def test_linear_cross_entropy_caps_logits(rows: int) -> None:
    hidden, weight, labels = leaf(10, 6), leaf(17, 6), torch.randint(0, 17, (10,))
    ours = ops.linear_cross_entropy(hidden, weight, labels, rows * 17 * 4, softcap=1.5)
    capped = 1.5 * torch.tanh(hidden @ weight.t() / 1.5)
    theirs = F.cross_entropy(capped, labels, reduction="sum")
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(ours, [hidden, weight])
    for a, b in zip(mine, torch.autograd.grad(theirs, [hidden, weight], retain_graph=True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    each, _ = ops.token_cross_entropy(hidden.detach(), weight.detach(), labels, rows * 17 * 4, softcap=1.5)
    torch.testing.assert_close(each.double(), F.cross_entropy(capped, labels, reduction="none"), rtol=1e-5, atol=1e-5)


def test_linear_cross_entropy_survives_huge_logits() -> None:
    hidden = torch.full((4, 2), 1e4, requires_grad=True)
    loss = ops.linear_cross_entropy(hidden, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([0, 1, 0, 1]), 64)
    assert torch.isfinite(loss)
    torch.testing.assert_close(loss, torch.tensor(8e4))


class _Products(TorchDispatchMode):
    """Notes the formats of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in func.__name__:
            self.formats += [arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_head_multiplies_in_half_precision(dtype: torch.dtype) -> None:
    """States after a norm in fp32 are wide: all three products must be narrow all the same, in every chunk."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 32, generator=generator).mul_(20).requires_grad_()
    weight = torch.randn(50, 32, generator=generator).mul_(0.05).requires_grad_()
    labels = torch.randint(0, 2, (300,), generator=generator)  # sums of 150 rows of states in one row of the head
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    reference = torch.autograd.grad(expected, [hidden, weight])
    with _Products() as seen, torch.autocast("cpu", dtype):
        loss = ops.linear_cross_entropy(hidden, weight, labels, chunk_bytes=64 * 50 * 4)
        losses, _ = ops.token_cross_entropy(hidden.detach(), weight.detach(), labels, 64 * 50 * 4)
    found = torch.autograd.grad(loss, [hidden, weight])
    assert set(seen.formats) == {dtype} and len(seen.formats) == 2 * 5 * 4
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    torch.testing.assert_close(losses.sum(), expected.detach(), rtol=2e-3, atol=0)
    for ours, theirs in zip(found, reference, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2


def test_many_large_states_do_not_overflow_fp16() -> None:
    hidden = torch.full((256, 4), 500.0, requires_grad=True)
    weight = torch.zeros(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = ops.linear_cross_entropy(hidden, weight, torch.zeros(256, dtype=torch.int64), chunk_bytes=1 << 20)
    (found,) = torch.autograd.grad(loss, [weight])
    torch.testing.assert_close(found[0], torch.full((4,), -256 * 500 * 2 / 3), rtol=1e-2, atol=0)


def test_token_cross_entropy_is_per_token() -> None:
    hidden, weight, labels = torch.randn(9, 4), torch.randn(11, 4), torch.randint(0, 11, (9,))
    labels[::2] = (hidden @ weight.t())[::2].argmax(dim=1)
    ours, hits = ops.token_cross_entropy(hidden, weight, labels, chunk_bytes=2 * 11 * 4)
    torch.testing.assert_close(ours, F.cross_entropy(hidden @ weight.t(), labels, reduction="none"))
    assert torch.equal(hits, (hidden @ weight.t()).argmax(dim=1) == labels) and hits[::2].all()
    empty = ops.token_cross_entropy(hidden[:0], weight, labels[:0], 64)
    assert [part.shape for part in empty] == [(0,), (0,)]


def test_frozen_weight_gets_no_gradient() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    ops.linear_cross_entropy(hidden, weight, torch.arange(5), 64).backward()
    assert hidden.grad is not None and weight.grad is None
