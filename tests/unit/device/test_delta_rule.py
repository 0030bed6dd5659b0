"""The gated delta rule over packed documents against its recurrence, token by token, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from anabatic.device.delta_rule import (
    DeltaInputs,
    DeltaPlan,
    chunk_gated_delta_rule,
    convolve,
    convolve_step,
    step_gated_delta_rule,
)

CPU = torch.device("cpu")
LENGTHS = [[1], [64], [65], [5, 130, 1, 64, 70, 3], [200, 2, 200], [1, 1, 1]]


def recur(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 10 of arXiv 2412.06464 for one document and one value head: q, k `[T, D]`, v `[T, E]`, g, beta `[T]`."""
    q, k, v, log_decay, beta = inputs
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out = []
    for t in range(len(q)):
        decayed = log_decay[t].exp() * state
        state = decayed + torch.outer(k[t], beta[t] * (v[t] - k[t] @ decayed))
        out.append(q[t] @ state / q.shape[1] ** 0.5)
    return torch.stack(out), state


def reference(inputs: DeltaInputs, lengths: list[int], initial: Tensor) -> tuple[Tensor, Tensor]:
    """All documents and heads: `[T, V, E]` and `[n, V, D, E]`."""
    ratio = inputs.v.shape[1] // inputs.k.shape[1]
    outputs, states = [], []
    for document, rows in enumerate(zip(*(x.split(lengths) for x in inputs), strict=True)):
        q, k, v, log_decay, beta = rows
        heads = [
            recur(
                [q[:, head // ratio], k[:, head // ratio], v[:, head], log_decay[:, head], beta[:, head]],
                initial[document, head],
            )
            for head in range(v.shape[1])
        ]
        outputs.append(torch.stack([out for out, _ in heads], dim=1))
        states.append(torch.stack([state for _, state in heads]))
    return torch.cat(outputs), torch.stack(states)


def make_inputs(tokens: int, dtype: torch.dtype = torch.float32) -> DeltaInputs:
    """Two key heads of 8, four value heads of 6; some tokens forget all, some nothing."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in ((2, 8), (2, 8), (4, 6)))
    log_decay = -torch.rand(tokens, 4, generator=generator).pow(8) * 30
    return DeltaInputs(q, k, v, log_decay, torch.rand(tokens, 4, generator=generator))


def borders(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize("starts", ["zero", "given"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunks_equal_the_recurrence(lengths: list[int], starts: str) -> None:
    inputs = DeltaInputs(*(x.requires_grad_() for x in make_inputs(sum(lengths))))
    initial = torch.randn(len(lengths), 4, 8, 6) if starts == "given" else None
    out, states = chunk_gated_delta_rule(inputs, DeltaPlan(borders(lengths), CPU), initial)
    wide = DeltaInputs(*(x.detach().double().requires_grad_() for x in inputs))
    before = torch.zeros(len(lengths), 4, 8, 6, dtype=torch.float64) if initial is None else initial.double()
    expected, last = reference(wide, lengths, before)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(states.double(), last, rtol=0, atol=2e-5)
    up, up_states = torch.randn_like(out), torch.randn_like(states)
    ((out * up).sum() + (states * up_states).sum()).backward()
    ((expected * up).sum() + (last * up_states).sum()).backward()
    for name, mine, theirs in zip(DeltaInputs._fields, inputs, wide, strict=True):
        assert mine.grad is not None and theirs.grad is not None, name
        scale = theirs.grad.abs().max() + 0.01  # of one token's decay it is 0 but for rounding
        torch.testing.assert_close(mine.grad.double() / scale, theirs.grad / scale, rtol=0, atol=5e-5, msg=name)


def test_tokens_one_by_one_equal_chunks() -> None:
    lengths = [70, 3, 9]
    inputs = make_inputs(sum(lengths))
    expected, last = chunk_gated_delta_rule(inputs, DeltaPlan(borders(lengths), CPU))
    for document, (start, end) in enumerate(itertools.pairwise(borders(lengths))):
        states = torch.zeros(1, 4, 8, 6)
        for token in range(start, end):
            out, states = step_gated_delta_rule(DeltaInputs(*(x[token : token + 1] for x in inputs)), states)
            torch.testing.assert_close(out, expected[token : token + 1], rtol=0, atol=2e-5)
        torch.testing.assert_close(states[0], last[document], rtol=0, atol=2e-5)


def test_low_precision_inputs_are_computed_in_fp32() -> None:
    inputs = make_inputs(90, torch.bfloat16)
    plan = DeltaPlan([0, 90], CPU)
    with torch.autocast("cpu", torch.bfloat16):
        out, states = chunk_gated_delta_rule(inputs, plan)
    wide, _ = chunk_gated_delta_rule(DeltaInputs(*(x.float() for x in inputs)), plan)
    assert out.dtype == states.dtype == torch.float32
    assert torch.equal(out, wide)


@pytest.mark.parametrize("biased", [False, True])
def test_convolution_stays_in_its_document(biased: bool) -> None:
    lengths, width = [1, 7, 2, 3], 4
    x = torch.randn(sum(lengths), 5, requires_grad=True)
    weight, bias = torch.randn(5, width, requires_grad=True), torch.randn(5) if biased else None
    past = torch.randn(len(lengths), width - 1, 5)
    plan = DeltaPlan(borders(lengths), CPU)
    for given in (None, past):
        out, tails = convolve(x, weight, bias, plan, given)
        expected, ends = [], []
        for document, rows in enumerate(x.split(lengths)):
            whole = torch.cat((torch.zeros(width - 1, 5) if given is None else given[document], rows))
            ends.append(whole[-(width - 1) :])
            for row in range(len(rows)):
                expected.append((whole[row : row + width] * weight.t()).sum(0) + (0 if bias is None else bias))
        torch.testing.assert_close(out, torch.stack(expected))
        assert torch.equal(tails, torch.stack(ends))
        up = torch.randn_like(out)
        mine = torch.autograd.grad((out * up).sum(), [x, weight])
        theirs = torch.autograd.grad((torch.stack(expected) * up).sum(), [x, weight])
        torch.testing.assert_close(mine, theirs)
    step, after = convolve_step(x[:4], weight, bias, past)
    one_each, tails = convolve(x[:4], weight, bias, DeltaPlan([0, 1, 2, 3, 4], CPU), past)
    torch.testing.assert_close(step, one_each)
    assert torch.equal(after, tails)
