"""The losses of reinforcement learning: pure functions of log-probabilities and advantages.

Shapes: `n` tokens that the model chose, of `S` answers. Every loss is a *sum*; it is divided by the number of tokens or
of answers in the step, as the algorithm says, where gradients of all micro-batches and ranks come together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass
class Tokens:
    """What a loss is made of.

    Attributes:
        now: fp32 `[n]`, log-probabilities under the model, with gradient.
        old: fp32 `[n]`, under the model that chose the tokens.
        answers: int64 `[n]`, the answer that each token belongs to.
        advantages: fp32 `[S]`.
        lengths: fp32 `[S]`, tokens of each answer.
        reference: fp32 `[n]`, under the reference model; None: there is none.
    """

    now: Tensor
    old: Tensor
    answers: Tensor
    advantages: Tensor
    lengths: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class Clip:
    """How far the ratio of new to old probability counts: from `1 - low` to `1 + high`."""

    low: float
    high: float


def surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """Return `-min(ratio A, clip(ratio, 1 - low, 1 + high) A)` (PPO, arXiv 1707.06347, equation 7; with `high > low`
    clip-higher of DAPO, arXiv 2503.14476, section 3.1)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)


def per_answer(values: Tensor, tokens: Tokens) -> Tensor:
    """Return the sum of the tokens' values over each answer `[S]`."""
    return values.new_zeros(tokens.lengths.shape).index_add(0, tokens.answers, values)


def kl(tokens: Tokens) -> Tensor:
    """Return each token's estimate of the divergence from the reference, `[n]`: `r - log r - 1` with
    `r = reference / now` (k3 of http://joschu.net/blog/kl-approx.html; GRPO, arXiv 2402.03300, equation 4)."""
    assert tokens.reference is not None
    gap = tokens.reference - tokens.now
    return gap.exp() - gap - 1


def _ratios(tokens: Tokens) -> Tensor:
    return (tokens.now - tokens.old).exp()


def _token_losses(tokens: Tokens, clip: Clip, kl_coef: float) -> Tensor:
    losses = surrogate(_ratios(tokens), tokens.advantages[tokens.answers], clip)
    return losses + kl_coef * kl(tokens) if kl_coef else losses


def grpo(tokens: Tokens, clip: Clip, kl_coef: float) -> Tensor:
    """Return the sum over answers of the mean over their tokens (GRPO, arXiv 2402.03300, equation 3)."""
    losses = _token_losses(tokens, clip, kl_coef)
    return (per_answer(losses, tokens) / tokens.lengths.clamp(min=1)).sum()


def token_level(tokens: Tokens, clip: Clip, kl_coef: float) -> Tensor:
    """Return the sum over all tokens, to be divided by their number in the step (DAPO, arXiv 2503.14476, equation 8;
    REINFORCE++, arXiv 2501.03262, with advantages of the whole step; Dr. GRPO, arXiv 2503.20783, section 3.2, to be
    divided by a constant)."""
    return _token_losses(tokens, clip, kl_coef).sum()


def gspo(tokens: Tokens, clip: Clip, kl_coef: float) -> Tensor:
    """Return the sum over answers of the clipped objective of *one* ratio for each, the geometric mean of its tokens'
    (GSPO, arXiv 2507.18071, equations 5 to 7)."""
    lengths = tokens.lengths.clamp(min=1)
    ratios = (per_answer(tokens.now - tokens.old, tokens) / lengths).exp()
    losses = surrogate(ratios, tokens.advantages, clip)
    if kl_coef:
        losses = losses + kl_coef * per_answer(kl(tokens), tokens) / lengths
    return losses.sum()


def rloo(tokens: Tokens, clip: Clip, kl_coef: float) -> Tensor:
    """Return the sum over answers of the clipped objective of the whole answer's ratio (RLOO, arXiv 2402.14740,
    equation 4: an answer is one action; the ratio, 1 in the first update of a rollout, is TRL's RLOOTrainer's)."""
    losses = surrogate(per_answer(tokens.now - tokens.old, tokens).exp(), tokens.advantages, clip)
    if kl_coef:
        losses = losses + kl_coef * per_answer(kl(tokens), tokens)
    return losses.sum()


@dataclass(frozen=True)
class Algorithm:
    """A row of the table.

    Attributes:
        loss: `loss(tokens, clip, kl_coef)`.
        per: what the sum of a step is divided by: tokens, answers, or answers x the longest answer there can be.
        advantage: its name in `rl.advantage`.
        clip: where the job says nothing.
    """

    loss: Callable[[Tokens, Clip, float], Tensor]
    per: Literal["token", "answer", "room"]
    advantage: str
    clip: Clip


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(grpo, "answer", "group", Clip(0.2, 0.2)),
    "dapo": Algorithm(token_level, "token", "group", Clip(0.2, 0.28)),
    "dr_grpo": Algorithm(token_level, "room", "mean", Clip(0.2, 0.2)),
    "gspo": Algorithm(gspo, "answer", "group", Clip(3e-4, 4e-4)),
    "reinforce++": Algorithm(token_level, "token", "batch", Clip(0.2, 0.2)),
    "rloo": Algorithm(rloo, "answer", "leave_one_out", Clip(0.2, 0.2)),
}
"""Name in the settings -> what it is. The bounds of the ratio are those of the papers' experiments."""
