"""Sampling against a slow reference in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError, DataError
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import GREEDY, Sampling, apply_penalties, choose_tokens, log_probability, make_random


def shares(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Token -> probability after temperature, top-k and top-p, written out step by step."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.temperature == 0:
        return {order[0]: 1.0}
    order = order[: sampling.top_k or len(order)]
    weights = [math.exp((logits[token] - logits[order[0]]) / sampling.temperature) for token in order]
    total, kept, mass = sum(weights), {}, 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and mass >= sampling.top_p:
            break
        if weight / weights[0] < sampling.min_p:
            break
        kept[token] = weight / total
        mass += weight / total
    order = kept if (sampling.top_k, sampling.top_p, sampling.min_p) != (None, 1, 0) else sorted(kept)
    return {token: kept[token] / mass for token in order}


def pick(probabilities: dict[int, float], draw: float) -> int:
    """The token whose share of [0, 1) holds `draw`."""
    end = 0.0
    for token, share in probabilities.items():
        end += share
        if draw < end:
            return token
    return token


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 1000]),
    top_p=st.sampled_from([0.01, 0.35, 0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
)


@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_choose_is_the_reference_row_by_row(rows, seed):
    rng = Random(seed)
    logits = [[rng.uniform(-4, 4) for _ in range(12)] for _ in rows]
    draws = [rng.random() for _ in rows]
    got = choose_tokens(torch.tensor(logits), rows, draws).tolist()
    for row, sampling in enumerate(rows):
        expected = shares(torch.tensor(logits[row]).tolist(), sampling)
        ends = [sum(list(expected.values())[: place + 1]) for place in range(len(expected))]
        if min(abs(draws[row] - end) for end in [0.0, *ends[:-1]]) > 1e-5:  # not on a border of two tokens
            assert got[row] == pick(expected, draws[row])
        assert got[row] in expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=None, top_p=1.0),
        Sampling(temperature=0.5, top_k=4, top_p=1.0),
        Sampling(temperature=1.5, top_k=None, top_p=0.7),
    ],
    ids=["plain", "top_k", "top_p"],
)
def test_frequencies_are_the_probabilities(sampling):
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5]
    draws = [(i + 0.5) / 4000 for i in range(4000)]
    tokens = choose_tokens(torch.tensor([logits] * 4000), [sampling] * 4000, draws).tolist()
    expected = shares(logits, sampling)
    assert set(tokens) == set(expected)
    for token, number in Counter(tokens).items():
        assert number / 4000 == pytest.approx(expected[token], abs=2e-3)


def test_choose_is_transformers_own_filter():
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)) * 3
    for sampling in (
        Sampling(temperature=0.7, top_k=10, top_p=0.6),
        Sampling(temperature=2.0, top_k=None, top_p=0.9),
    ):
        warped = logits / sampling.temperature
        if sampling.top_k:
            warped = transformers.TopKLogitsWarper(sampling.top_k)(None, warped)
        warped = transformers.TopPLogitsWarper(sampling.top_p)(None, warped)
        for row in range(3):
            allowed = set(torch.isfinite(warped[row]).nonzero().flatten().tolist())
            assert allowed == set(shares(logits[row].tolist(), sampling))


def test_extremes_stay_in_the_vocabulary():
    logits = torch.tensor([[0.0, 0.0, 0.0], [1e4, -1e4, 0.0], [float("-inf"), 1.0, float("-inf")]])
    hot, cold = Sampling(temperature=1e3, top_k=None), Sampling(temperature=1e-6, top_k=None)
    for draw in (0.0, 0.5, 1.0 - 2**-24, 1.0 - 2**-53):
        tokens = choose_tokens(logits, [hot, cold, hot], [draw] * 3).tolist()
        assert 0 <= tokens[0] < 3
        assert tokens[1:] == [0, 1]


def test_greedy_takes_the_first_of_equals_and_ignores_the_draw():
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    assert [choose_tokens(logits, [GREEDY], [draw]).item() for draw in (0.0, 0.9)] == [1, 1]


def test_draws_follow_the_seed():
    first, same, other = (make_random(Sampling(seed=seed)) for seed in (7, 7, 8))
    drawn = [first.random() for _ in range(5)]
    assert drawn == [same.random() for _ in range(5)]
    assert drawn != [other.random() for _ in range(5)]
    assert make_random(Sampling()).random() != make_random(Sampling()).random()


def test_log_probability_is_log_softmax():
    logits = torch.randn(4, 9)
    tokens = torch.tensor([0, 8, 3, 3])
    expected = logits.double().log_softmax(-1)[range(4), tokens]
    torch.testing.assert_close(log_probability(logits, tokens).double(), expected, rtol=1e-5, atol=1e-6)


def test_what_single_tokens_lose_and_gain(model, tokenizer):
    """Biases count from the first token, presence once, frequency as often as the answer holds a token."""
    settings = [
        Sampling(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={"7": 3.0, "9": -100.0}),
        Sampling(repetition_penalty=2.0, frequency_penalty=-1.0),
        Sampling(),
    ]
    engine = Engine(model, tokenizer, max_batch=3, max_len=32)
    requests = [engine.request([5, 5, 7], one, []) for one in settings]
    for request in requests:
        request.ids += [7, 8, 7]
    logits = torch.randn(3, len(tokenizer), generator=torch.Generator().manual_seed(1))
    shifted = apply_penalties(logits, requests)
    for row, sampling in enumerate(settings):
        for token in range(len(tokenizer)):
            value, times = logits[row, token].item(), [7, 8, 7].count(token)
            if token in (5, 7, 8):
                value *= sampling.repetition_penalty if value < 0 else 1 / sampling.repetition_penalty
            value += sampling.logit_bias.get(str(token), 0.0)
            value -= sampling.presence_penalty * (times > 0) + sampling.frequency_penalty * times
            assert shifted[row, token].item() == pytest.approx(value, abs=1e-5)
    assert apply_penalties(logits[2:], requests[2:]) is not None and torch.equal(shifted[2], logits[2])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3.0"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias names 'the'"),
        ({"logit_bias": {"3": 101.0}}, "logit_bias of 3 is 101.0"),
    ],
)
def test_penalties_out_of_their_range(given, words):
    with pytest.raises(ConfigError, match=words):
        Sampling(**given)


def test_a_bias_of_a_token_that_the_model_has_not(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=1, max_len=32)
    with pytest.raises(DataError, match="logit_bias names token 99999"):
        engine.request([5], Sampling(logit_bias={"99999": 1.0}))
