"""Choosing the next token: pure functions of logits, settings and one uniform number per row.

The form of the answer, the penalties and the biases come first, then temperature, top-k, top-p and min-p, as
transformers' `generate` orders and defines them. Each request brings its own number, so what it draws does not depend
on who else is in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from anabatic.config.chat import Sampling
from anabatic.device.device import send_to_device
from anabatic.infer.request import Request, TopLogprobs

__all__ = ["GREEDY", "Sampling", "choose_tokens", "log_probability", "apply_penalties", "sample_tokens", "make_random"]

GREEDY = Sampling(temperature=0.0)
"""The likeliest token, always."""


def make_random(sampling: Sampling) -> Random:
    """Return the generator of a request's uniform numbers: fixed by its seed, or fresh without one."""
    return Random(sampling.seed) if sampling.seed is not None else Random()


def sample_tokens(
    logits: Tensor, requests: Sequence[Request], scaled: bool = False
) -> list[tuple[int, float, TopLogprobs]]:
    """Return the next token of each request, its log-probability and the likeliest ones; the host waits once.

    Args:
        logits: fp32 `[B, V]`.
        scaled: log-probabilities of chosen tokens are those at the request's temperature, not at 1.
    """
    samplings = [request.sampling for request in requests]
    shaped = _mask_disallowed(apply_penalties(logits, requests), requests)
    if shaped is logits and all(sampling.temperature == 0 for sampling in samplings):
        tokens = logits.max(dim=-1).indices  # faster than argmax
        chances = log_probability(logits, tokens)
    else:
        draws = [request.random.random() if request.sampling.temperature > 0 else 0.0 for request in requests]
        tokens = choose_tokens(shaped, samplings, draws)
        warm = (
            _scale_by_temperature(logits, samplings)
            if scaled and all(one.temperature > 0 for one in samplings)
            else logits
        )
        chances = log_probability(warm, tokens)
    # Token numbers are exact in fp32 up to 2^24: one copy to the host brings everything.
    parts = [tokens.float().unsqueeze(1), chances.unsqueeze(1)]
    max_logprobs = max(sampling.top_logprobs for sampling in samplings)
    if max_logprobs:
        best = logits.topk(max_logprobs, dim=-1).indices
        parts += [logits.log_softmax(-1).gather(1, best), best.float()]
    rows = torch.cat(parts, dim=-1).tolist()
    return [
        (
            int(row[0]),
            row[1],
            [(int(token), value) for value, token in zip(row[2 : 2 + n], row[2 + max_logprobs :], strict=False)],
        )
        for row, n in zip(rows, (sampling.top_logprobs for sampling in samplings), strict=True)
    ]


def apply_penalties(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Return logits with the repetition penalty (CTRL, arXiv 1909.05858, section 4.1): those of tokens that have come
    are divided by it where they are positive, else multiplied."""
    rows = [row for row, request in enumerate(requests) if request.sampling.repetition_penalty != 1]
    if not rows:
        return _apply_biases(logits, requests)
    seen = [sorted({*requests[row].prompt, *requests[row].ids}) for row in rows]
    flat = torch.tensor([row for row, some in zip(rows, seen, strict=True) for _ in some])
    index = (
        send_to_device(flat, logits.device),
        send_to_device(torch.tensor([token for some in seen for token in some]), logits.device),
    )
    factors = [requests[row].sampling.repetition_penalty for row, some in zip(rows, seen, strict=True) for _ in some]
    penalty = send_to_device(torch.tensor(factors), logits.device)
    values = logits[index]
    changed = logits.index_put(index, torch.where(values < 0, values * penalty, values / penalty))
    return _apply_biases(changed, requests)


def _apply_biases(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Return logits with what is added to those of single tokens: biases, and the presence and frequency penalties of
    what the answer holds so far (OpenAI's API reference; the prompt does not count)."""
    rows: list[int] = []
    tokens: list[int] = []
    shifts: list[float] = []
    for row, request in enumerate(requests):
        sampling = request.sampling
        shift = {int(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, times in Counter(request.ids).items():
                off = sampling.presence_penalty + sampling.frequency_penalty * times
                shift[token] = shift.get(token, 0.0) - off
        rows += [row] * len(shift)
        tokens += shift.keys()
        shifts += shift.values()
    if not rows:
        return logits
    index = send_to_device(torch.tensor(rows), logits.device), send_to_device(torch.tensor(tokens), logits.device)
    return logits.index_put(index, logits[index] + send_to_device(torch.tensor(shifts), logits.device))


def _mask_disallowed(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Rule out what the forms of the answers do not allow."""
    rows = [row for row, request in enumerate(requests) if request.constraint is not None]
    if rows:
        logits = logits.clone()
        for row in rows:
            allowed: Tensor = requests[row].constraint.allowed_tokens()  # type: ignore[union-attr]
            logits[row].masked_fill_(~send_to_device(allowed, logits.device), float("-inf"))
    return logits


def choose_tokens(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    """Return the next token of each row.

    Args:
        logits: `[B, V]`.
        samplings: settings of each row.
        draws: a uniform number in [0, 1) for each row; greedy rows do not look at theirs.

    Returns:
        int64 `[B]`, on the device of `logits`.
    """
    tokens = logits.argmax(dim=-1)
    sampled_rows = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    unfiltered_rows = [row for row in sampled_rows if _is_unfiltered(samplings[row])]
    cut = [row for row in sampled_rows if not _is_unfiltered(samplings[row])]
    for rows, draw in ((unfiltered_rows, _draw_unfiltered), (cut, _draw_filtered)):
        if rows:
            every = len(rows) == logits.shape[0]
            some = logits.float() if every else logits[send_to_device(torch.tensor(rows), logits.device)].float()
            picked = draw(some, [samplings[row] for row in rows], [draws[row] for row in rows])
            tokens = picked if every else tokens.index_put((send_to_device(torch.tensor(rows), logits.device),), picked)
    return tokens


def _is_unfiltered(sampling: Sampling) -> bool:
    return sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0


def _scale_by_temperature(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    # Dividing after subtracting the largest keeps a temperature near zero finite.
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    return shifted / _to_column([sampling.temperature for sampling in samplings], logits)


def _draw_unfiltered(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    """Nothing is cut: tokens stay in the order of the vocabulary, which saves sorting it."""
    return _search_draws(torch.softmax(_scale_by_temperature(logits, samplings), dim=-1), draws)


def _draw_filtered(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    vocabulary = logits.shape[-1]
    limits = [min(sampling.top_k or vocabulary, vocabulary) for sampling in samplings]
    values, tokens = torch.topk(_scale_by_temperature(logits, samplings), max(limits), dim=-1)
    places = torch.arange(values.shape[-1], device=logits.device)[None, :]
    values = values.masked_fill(places >= _to_column(limits, logits), float("-inf"))
    probabilities = torch.softmax(values, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = before < _to_column([sampling.top_p for sampling in samplings], logits)
    keep &= probabilities >= _to_column([sampling.min_p for sampling in samplings], logits) * probabilities[:, :1]
    keep[:, 0] = True
    return tokens.gather(1, _search_draws(probabilities.masked_fill(~keep, 0.0), draws)[:, None]).squeeze(1)


def _search_draws(probabilities: Tensor, draws: Sequence[float]) -> Tensor:
    """Return which share of each row holds its draw."""
    ends = probabilities.cumsum(dim=-1)
    place = torch.searchsorted(ends, _to_column(draws, probabilities) * ends[:, -1:], right=True)
    # A draw that rounding pushed past the end takes the last token that has a share. No row without numbers (NaN) has
    # one; whoever asked finds out by its log-probability.
    order = torch.arange(1, probabilities.shape[-1] + 1, device=probabilities.device)
    last = ((probabilities > 0) * order).amax(dim=-1, keepdim=True) - 1
    return torch.minimum(place, last).clamp_(min=0).squeeze(1)


def _to_column(values: Sequence[float], like: Tensor) -> Tensor:
    return send_to_device(torch.tensor(values, dtype=torch.float32), like.device).unsqueeze(1)


def log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability that the model itself gives each row's token (temperature 1, nothing cut),
    fp32 `[B]`."""
    return logits.float().log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
