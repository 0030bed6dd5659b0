"""Every loss against the formula of its paper, written out answer by answer and token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.rl import rollout_batches
from anabatic.rl.policy_loss import ALGORITHMS, ClipRange, TokenLogProbs, correct_engine

LOW, HIGH, BETA = 0.2, 0.28, 0.05
Answer = tuple[float, list[float], list[float], list[float]]
"""Advantage; log-probabilities now, before, and under the reference."""


def clipped(ratio: float, value: float) -> float:
    return min(ratio * value, min(max(ratio, 1 - LOW), 1 + HIGH) * value)


def divergence(now: float, reference: float) -> float:
    ratio = math.exp(reference) / math.exp(now)
    return ratio - math.log(ratio) - 1


def by_token(answer: Answer) -> float:
    value, now, old, reference = answer
    each = zip(now, old, reference, strict=True)
    return sum(clipped(math.exp(n) / math.exp(o), value) - BETA * divergence(n, r) for n, o, r in each)


def grpo(answers: list[Answer]) -> float:
    return -sum(by_token(answer) / len(answer[1]) for answer in answers)


def token_level(answers: list[Answer]) -> float:
    return -sum(map(by_token, answers))


def gspo(answers: list[Answer]) -> float:
    total = 0.0
    for value, now, old, reference in answers:
        ratio = (math.exp(sum(now)) / math.exp(sum(old))) ** (1 / len(now))
        total += clipped(ratio, value) - BETA * sum(map(divergence, now, reference)) / len(now)
    return -total


def rloo(answers: list[Answer]) -> float:
    total = 0.0
    for value, now, old, reference in answers:
        total += clipped(math.exp(sum(now) - sum(old)), value) - BETA * sum(map(divergence, now, reference))
    return -total


SLOW: dict[str, Callable[[list[Answer]], float]] = {
    "grpo": grpo, "dapo": token_level, "dr_grpo": token_level, "gspo": gspo, "reinforce++": token_level, "rloo": rloo,
}  # fmt: skip

logs = st.floats(-3, -0.01)


@st.composite
def drawn(draw: st.DrawFn) -> list[Answer]:
    answers = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 5))
        numbers = [draw(st.lists(logs, min_size=length, max_size=length)) for _ in range(3)]
        answers.append((draw(st.floats(-2, 2)), *numbers))
    return answers


def tokens_of(answers: list[Answer]) -> TokenLogProbs:
    flat = [torch.tensor([x for one in answers for x in one[at]], dtype=torch.float64) for at in (1, 2, 3)]
    lengths = torch.tensor([len(one[1]) for one in answers])
    owner = torch.repeat_interleave(torch.arange(len(answers)), lengths)
    values = torch.tensor([one[0] for one in answers], dtype=torch.float64)
    return TokenLogProbs(flat[0].requires_grad_(), flat[1], owner, values, lengths.double(), flat[2])


@pytest.mark.parametrize("name", ALGORITHMS)
@given(answers=drawn())
@settings(max_examples=25, deadline=None)
def test_values(name: str, answers: list[Answer]) -> None:
    loss = ALGORITHMS[name].loss_function(tokens_of(answers), ClipRange(LOW, HIGH), BETA)
    assert loss.item() == pytest.approx(SLOW[name](answers), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_on_policy_is_that_of_reinforce(name: str) -> None:
    """Where nothing has been updated yet, every ratio is 1: the gradient is `-A grad log p`, averaged in its way."""
    answers: list[Answer] = [(1.5, [-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0]), (-0.5, [-0.3], [-0.3], [-0.3])]
    tokens = tokens_of(answers)
    ALGORITHMS[name].loss_function(tokens, ClipRange(LOW, HIGH), 0.0).backward()
    share = 0.5 if name in ("grpo", "gspo") else 1.0
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-1.5 * share, -1.5 * share, 0.5])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_to_learn_is_a_loss_of_zero_with_a_gradient(name: str) -> None:
    none = torch.zeros(0)
    now = torch.zeros(0, requires_grad=True)
    tokens = TokenLogProbs(now, none, none.long(), torch.zeros(1), torch.zeros(1), none)
    loss = ALGORITHMS[name].loss_function(tokens, ClipRange(LOW, HIGH), BETA)
    loss.backward()
    assert loss.item() == 0.0


def test_advantages() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    deviation = math.sqrt(4 * 0.25 / 3)
    assert rollout_batches.normalize_by_group(rewards)[0] == pytest.approx(
        np.array([0.5, -0.5, -0.5, 0.5]) / (deviation + 1e-4)
    )
    assert (
        not rollout_batches.normalize_by_group(rewards)[1].any()
        and not rollout_batches.subtract_group_mean(rewards)[1].any()
    )
    assert rollout_batches.subtract_group_mean(rewards)[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert rollout_batches.subtract_leave_one_out(rewards)[0].tolist() == pytest.approx(
        [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3]
    )
    every = rollout_batches.normalize_by_batch(rewards)
    assert every.mean() == pytest.approx(0) and every.std(ddof=1) == pytest.approx(1, rel=1e-3)
    one = np.array([[2.0]])
    assert [make(one).item() for make in rollout_batches.ADVANTAGES.values()] == [0.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("name", ["token", "sequence", "token_mask", "sequence_mask"])
@given(answers=drawn())
@settings(max_examples=25, deadline=None)
def test_corrections_of_the_engine(name: str, answers: list[Answer]) -> None:
    """The reference's place holds what the engine had; weights by the formula, token by token."""
    tokens, cap = tokens_of(answers), 1.5
    assert tokens.reference_logprobs is not None
    gap = tokens.old_logprobs - tokens.reference_logprobs
    tokens.weights, bound = correct_engine(name, cap, gap, tokens)
    expected: list[float] = []
    for _, _, old, engine in answers:
        each = [math.exp(mine - theirs) for mine, theirs in zip(old, engine, strict=True)]
        ratios = each if name.startswith("token") else [math.prod(each)] * len(each)
        expected += [(one if 1 / cap <= one <= cap else 0.0) if "mask" in name else min(one, cap) for one in ratios]
    assert tokens.weights.tolist() == pytest.approx(expected)
    assert bound.tolist() == [one == 0 or one == pytest.approx(cap, abs=1e-12) for one in expected]
    kinds = [token_level] if name.startswith("token") else [token_level, gspo, rloo]
    for slow in kinds:
        by_hand, at = 0.0, 0
        for value, now, old, _ in answers:
            weights, at = expected[at : at + len(now)], at + len(now)
            if slow is token_level:
                for weight, mine, before in zip(weights, now, old, strict=True):
                    by_hand -= weight * clipped(math.exp(mine - before), value)
            else:
                power = sum(now) - sum(old)
                by_hand -= weights[0] * clipped(math.exp(power / len(now) if slow is gspo else power), value)
        algorithm = {token_level: "dapo", gspo: "gspo", rloo: "rloo"}[slow]
        loss = ALGORITHMS[algorithm].loss_function(tokens, ClipRange(LOW, HIGH), 0.0)
        assert loss.item() == pytest.approx(by_hand, rel=1e-9, abs=1e-9)
