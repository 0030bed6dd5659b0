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
class TokenLogProbs:
    """Inputs of a loss.

    Attributes:
        logprobs: fp32 `[n]`, log-probabilities under the model, with gradient.
        old_logprobs: fp32 `[n]`, under the model that chose the tokens.
        answer_index: int64 `[n]`, the answer that each token belongs to.
        advantages: fp32 `[S]`.
        lengths: fp32 `[S]`, tokens of each answer.
        reference_logprobs: fp32 `[n]`, under the reference model; None: there is none.
        weights: fp32 `[n]`, from `correct_engine`, by which the objective of each token is multiplied; None: 1.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    answer_index: Tensor
    advantages: Tensor
    lengths: Tensor
    reference_logprobs: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class ClipRange:
    """Clipping range of the ratio of new to old probability: from `1 - low` to `1 + high`."""

    low: float
    high: float


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """Return `-min(ratio A, clip(ratio, 1 - low, 1 + high) A)` (PPO, arXiv 1707.06347, equation 7; with `high > low`
    clip-higher of DAPO, arXiv 2503.14476, section 3.1)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)


def sum_per_answer(values: Tensor, tokens: TokenLogProbs) -> Tensor:
    """Return the sum of the tokens' values over each answer `[S]`."""
    return values.new_zeros(tokens.lengths.shape).index_add(0, tokens.answer_index, values)


def correct_engine(name: str, cap: float, gap: Tensor, tokens: TokenLogProbs) -> tuple[Tensor, Tensor]:
    """Return the weight of each token for what drew it not being what is trained, and whether it is at a bound, `[n]`.

    Truncated importance sampling (Ionides 2008, J. Comput. Graph. Stat. 17, section 2), or a mask on both sides
    (IcePop of arXiv 2510.18855), of each token or of the product over an answer.

    Args:
        name: `token`, `sequence`, `token_mask` or `sequence_mask`.
        cap: largest weight; a mask also leaves out what is below its inverse.
        gap: log-probabilities of the trainer before the round's first update less the engine's, without gradient.
    """
    if name.startswith("sequence"):
        gap = sum_per_answer(gap, tokens)[tokens.answer_index]
    ratios = gap.clamp(max=80.0).exp()  # e^80 is finite in fp32
    if name.endswith("mask"):
        beyond = (ratios > cap) | (ratios < 1 / cap)
        return ratios.masked_fill(beyond, 0.0), beyond
    return ratios.clamp(max=cap), ratios > cap


def kl_divergence(tokens: TokenLogProbs) -> Tensor:
    """Return each token's estimate of the divergence from the reference, `[n]`: `r - log r - 1` with
    `r = reference / now` (k3 of http://joschu.net/blog/kl-approx.html; GRPO, arXiv 2402.03300, equation 4)."""
    assert tokens.reference_logprobs is not None
    gap = tokens.reference_logprobs - tokens.logprobs
    return gap.exp() - gap - 1


def _importance_ratios(tokens: TokenLogProbs) -> Tensor:
    return (tokens.logprobs - tokens.old_logprobs).exp()


def _weigh_answers(losses: Tensor, tokens: TokenLogProbs) -> Tensor:
    """Return the losses of answers times the weight that all tokens of an answer have."""
    if tokens.weights is None:
        return losses
    return losses * sum_per_answer(tokens.weights, tokens) / tokens.lengths.clamp(min=1)


def _token_losses(tokens: TokenLogProbs, clip: ClipRange, kl_coef: float) -> Tensor:
    losses = clipped_surrogate(_importance_ratios(tokens), tokens.advantages[tokens.answer_index], clip)
    losses = losses if tokens.weights is None else losses * tokens.weights
    return losses + kl_coef * kl_divergence(tokens) if kl_coef else losses


def grpo_loss(tokens: TokenLogProbs, clip: ClipRange, kl_coef: float) -> Tensor:
    """Return the sum over answers of the mean over their tokens (GRPO, arXiv 2402.03300, equation 3)."""
    losses = _token_losses(tokens, clip, kl_coef)
    return (sum_per_answer(losses, tokens) / tokens.lengths.clamp(min=1)).sum()


def token_level_loss(tokens: TokenLogProbs, clip: ClipRange, kl_coef: float) -> Tensor:
    """Return the sum over all tokens, to be divided by their number in the step (DAPO, arXiv 2503.14476, equation 8;
    REINFORCE++, arXiv 2501.03262, with advantages of the whole step; Dr. GRPO, arXiv 2503.20783, section 3.2, to be
    divided by a constant)."""
    return _token_losses(tokens, clip, kl_coef).sum()


def gspo_loss(tokens: TokenLogProbs, clip: ClipRange, kl_coef: float) -> Tensor:
    """Return the sum over answers of the clipped objective of *one* ratio for each, the geometric mean of its tokens'
    (GSPO, arXiv 2507.18071, equations 5 to 7)."""
    lengths = tokens.lengths.clamp(min=1)
    ratios = (sum_per_answer(tokens.logprobs - tokens.old_logprobs, tokens) / lengths).exp()
    losses = _weigh_answers(clipped_surrogate(ratios, tokens.advantages, clip), tokens)
    if kl_coef:
        losses = losses + kl_coef * sum_per_answer(kl_divergence(tokens), tokens) / lengths
    return losses.sum()


def rloo_loss(tokens: TokenLogProbs, clip: ClipRange, kl_coef: float) -> Tensor:
    """Return the sum over answers of the clipped objective of the whole answer's ratio (RLOO, arXiv 2402.14740,
    equation 4: an answer is one action; the ratio, 1 in the first update of a rollout, is TRL's RLOOTrainer's)."""
    ratios = sum_per_answer(tokens.logprobs - tokens.old_logprobs, tokens).exp()
    losses = _weigh_answers(clipped_surrogate(ratios, tokens.advantages, clip), tokens)
    if kl_coef:
        losses = losses + kl_coef * sum_per_answer(kl_divergence(tokens), tokens)
    return losses.sum()


@dataclass(frozen=True)
class RlAlgorithm:
    """A row of the table.

    Attributes:
        loss_function: `loss(tokens, clip, kl_coef)`.
        normalizer: what the sum of a step is divided by: tokens, answers, or answers x the longest answer there can be.
        advantage_name: its name in `rl.advantages`.
        default_clip: where the job says nothing.
    """

    loss_function: Callable[[TokenLogProbs, ClipRange, float], Tensor]
    normalizer: Literal["token", "answer", "room"]
    advantage_name: str
    default_clip: ClipRange


ALGORITHMS: dict[str, RlAlgorithm] = {
    "grpo": RlAlgorithm(grpo_loss, "answer", "group", ClipRange(0.2, 0.2)),
    "dapo": RlAlgorithm(token_level_loss, "token", "group", ClipRange(0.2, 0.28)),
    "dr_grpo": RlAlgorithm(token_level_loss, "room", "mean", ClipRange(0.2, 0.2)),
    "gspo": RlAlgorithm(gspo_loss, "answer", "group", ClipRange(3e-4, 4e-4)),
    "reinforce++": RlAlgorithm(token_level_loss, "token", "batch", ClipRange(0.2, 0.2)),
    "rloo": RlAlgorithm(rloo_loss, "answer", "leave_one_out", ClipRange(0.2, 0.2)),
}
"""Name in the settings -> what it is. The bounds of the ratio are those of the papers' experiments."""
