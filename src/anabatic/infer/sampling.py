"""Choosing the next token: pure functions of logits, settings and one uniform number per row.

Temperature, then top-k, then top-p, as transformers' `generate` orders them. Each request brings its own
number, so what it draws does not depend on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from anabatic.config.chat import Sampling

__all__ = ["GREEDY", "Sampling", "choose", "log_probability", "source_of_draws"]

GREEDY = Sampling(temperature=0.0)
"""The likeliest token, always."""


def source_of_draws(sampling: Sampling) -> Random:
    """Return the generator of a request's uniform numbers: fixed by its seed, or fresh without one."""
    return Random(sampling.seed) if sampling.seed is not None else Random()


def choose(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    """Return the next token of each row.

    Args:
        logits: `[B, V]`.
        samplings: settings of each row.
        draws: a uniform number in [0, 1) for each row; greedy rows do not look at theirs.

    Returns:
        int64 `[B]`, on the device of `logits`.
    """
    tokens = logits.argmax(dim=-1)
    rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if rows:
        picked = _draw(logits[rows].float(), [samplings[row] for row in rows], [draws[row] for row in rows])
        tokens[rows] = picked
    return tokens


def _draw(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    vocabulary = logits.shape[-1]
    limits = [min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings]
    # Dividing after subtracting the largest keeps a temperature near zero finite.
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    scaled = shifted / _column([sampling.temperature for sampling in samplings], logits)
    values, tokens = torch.topk(scaled, max(limits), dim=-1)
    places = torch.arange(values.shape[-1], device=logits.device)[None, :]
    values = values.masked_fill(places >= _column(limits, logits), float("-inf"))
    shares = torch.softmax(values, dim=-1)
    before = shares.cumsum(dim=-1) - shares
    keep = before < _column([sampling.top_p for sampling in samplings], logits)
    keep[:, 0] = True
    shares = shares.masked_fill(~keep, 0.0)
    ends = shares.cumsum(dim=-1)
    targets = _column(draws, logits) * ends[:, -1:]
    place = torch.searchsorted(ends, targets, right=True)
    # A draw that rounding pushed past the end takes the last token that has a share.
    last = (shares > 0).sum(dim=-1, keepdim=True) - 1
    # No row without numbers (NaN) has a share; whoever asked finds out by its log-probability.
    return tokens.gather(1, torch.minimum(place, last).clamp_(min=0)).squeeze(1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability that the model itself gives each row's token (temperature 1, nothing cut),
    fp32 `[B]`."""
    values = logits.float()
    return values.gather(1, tokens.unsqueeze(1)).squeeze(1) - values.logsumexp(dim=-1)
