"""Operators of expert layers against a loop over tokens, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.device.experts import (
    _GroupedMatmul,
    compute_expert_ends,
    grouped_reference,
    permute_reference,
    unpermute_reference,
)
from unit.device.test_ops import check_same, leaf


def layer(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    rows, places = permute_reference(x, index)
    product = grouped_reference(rows, weight, compute_expert_ends(index, weight.shape[0]))
    return unpermute_reference(product, places, probs)


def slow(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    rows = [
        sum((x[t] @ weight[int(expert)]) * p for expert, p in zip(index[t], probs[t], strict=True))
        for t in range(x.shape[0])
    ]
    return torch.stack(rows)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(3, 6), st.integers(0, 2**31))
def test_tokens_go_to_their_experts_and_back(tokens: int, choices: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)])
    x, weight, probs = leaf(tokens, 5), leaf(experts, 5, 4), leaf(tokens, choices)
    check_same(layer(x, weight, index, probs), slow(x, weight, index, probs), [x, weight, probs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[3, 3, 7, 9], [0, 0, 0, 9], [9, 9, 9, 9]])
@pytest.mark.parametrize("transposed", [False, True])
def test_torchs_own_grouped_product_is_the_loop_over_groups(
    dtype: torch.dtype, ends: list[int], transposed: bool
) -> None:
    torch.manual_seed(0)
    x, up = torch.randn(9, 16).to(dtype), torch.randn(9, 8).to(dtype)
    stored = torch.randn(4, *((8, 16) if transposed else (16, 8))).to(dtype)
    found = []
    for compute in (grouped_reference, _GroupedMatmul.apply):
        rows, weight = x.clone().requires_grad_(), stored.clone().requires_grad_()
        out = compute(rows, weight.transpose(1, 2) if transposed else weight, torch.tensor(ends))
        out.backward(up[:, :1].expand(9, 8))  # a gradient that is not contiguous
        found.append((out, rows.grad, weight.grad))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_rows_lie_by_expert() -> None:
    index = torch.tensor([[2, 0], [0, 1], [2, 0]])
    rows, places = permute_reference(torch.arange(3.0)[:, None], index)
    assert rows.flatten().tolist() == [0, 1, 2, 1, 0, 2]
    assert places.tolist() == [4, 0, 1, 3, 5, 2]
    assert compute_expert_ends(index, 4).tolist() == [3, 4, 6, 6]


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    x, weight = leaf(6, 3), leaf(2, 3, 4)
    {"x": x, "weight": weight}[frozen].requires_grad_(False)
    grouped_reference(x, weight, torch.tensor([2, 6])).sum().backward()
    assert (x.grad is None) == (frozen == "x") and (weight.grad is None) == (frozen == "weight")
