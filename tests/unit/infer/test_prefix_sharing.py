"""Shared beginnings, prompts in pieces, requests that wait or make room: the tokens are those of a lone run."""

from __future__ import annotations

from random import Random

import pytest

from anabatic.core.errors import DataError
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling


def greedy(tokens, **more):
    return Sampling(temperature=0.0, max_new_tokens=tokens, **more)


def alone(model, tokenizer, prompts, samplings):
    """Each request in its own engine."""
    return [
        Engine(model, tokenizer, max_batch=1, max_len=128).generate([prompt], each, [])[0].ids
        for prompt, each in zip(prompts, samplings, strict=True)
    ]


def some(tokenizer, number, seed, beginning=0, longest=30):
    rng = Random(seed)
    shared = [rng.randrange(len(tokenizer)) for _ in range(beginning)]
    return [shared + [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def run(engine, requests):
    engine.submit(requests)
    while engine.is_busy:
        engine.step()
    return [request.ids for request in requests]


def test_equal_beginnings_are_read_once(model, tokenizer):
    prompts = some(tokenizer, 6, 0, beginning=40)
    samplings = [greedy(12)] * 6
    engine = Engine(model, tokenizer, max_batch=6, max_len=128)
    requests = [engine.request(prompt, greedy(12), []) for prompt in prompts]
    assert run(engine, requests) == alone(model, tokenizer, prompts, samplings)
    assert [request.cached_tokens for request in requests] == [0] + [32] * 5
    again = [engine.request(prompt, greedy(12), []) for prompt in prompts]
    assert run(engine, again) == [request.ids for request in requests]
    assert all(request.cached_tokens >= 32 for request in again)
    assert engine.get_load().used == 0


def test_several_answers_to_one_prompt_share_its_blocks(model, tokenizer):
    prompt = some(tokenizer, 1, 1, beginning=60)[0]
    samplings = [Sampling(temperature=1.0, seed=seed, max_new_tokens=20) for seed in range(5)]
    engine = Engine(model, tokenizer, max_batch=5, max_len=128)
    requests = [engine.request(prompt, each, []) for each in samplings]
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    own = -(-len(prompt) // 16) * 5
    assert engine.get_load().used <= own - 4 * (len(prompt) // 16 - 1)
    while engine.is_busy:
        engine.step()
    assert [request.ids for request in requests] == alone(model, tokenizer, [prompt] * 5, samplings)
    assert len({tuple(request.ids) for request in requests}) == 5


def test_a_later_turn_takes_the_blocks_of_the_answer_too(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=1, max_len=128)
    first = engine.request(some(tokenizer, 1, 2)[0], greedy(40), [])
    run(engine, [first])
    second = engine.request([*first.prompt, *first.ids, 5, 6], greedy(8), [])
    run(engine, [second])
    assert second.cached_tokens == (len(first.prompt) + len(first.ids) - 1) // 16 * 16


@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_long_prompts_are_read_in_pieces_while_others_are_answered(model, tokenizer, step_tokens):
    prompts = some(tokenizer, 5, 3, longest=90)
    engine = Engine(model, tokenizer, max_batch=4, max_len=128, step_tokens=step_tokens)
    samplings = [greedy(10 + n) for n in range(5)]
    requests = [engine.request(prompt, each, []) for prompt, each in zip(prompts, samplings, strict=True)]
    assert run(engine, requests) == alone(model, tokenizer, prompts, samplings)


@pytest.mark.parametrize("cache_tokens", [96, 128, 200])
def test_requests_wait_for_memory_and_make_room_for_older_ones(model, tokenizer, cache_tokens):
    prompts = some(tokenizer, 9, 4, beginning=17)
    samplings = [greedy(20 + 4 * n) for n in range(9)]
    engine = Engine(model, tokenizer, max_batch=6, max_len=96, cache_tokens=cache_tokens, step_tokens=40)
    requests = [engine.request(prompt, each, []) for prompt, each in zip(prompts, samplings, strict=True)]
    ids = run(engine, requests)
    expected = alone(model, tokenizer, prompts, samplings)
    assert ids == [row[: len(got)] for row, got in zip(expected, ids, strict=True)]
    assert [len(row) for row in ids] == [request.max_answer_tokens for request in requests]
    assert engine.get_load().preemptions > 0
    assert engine.get_load().used == 0


def test_blocks_of_requests_that_leave_early_come_back(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=3, max_len=96, step_tokens=16)
    requests = [engine.request(prompt, greedy(30), []) for prompt in some(tokenizer, 8, 5, beginning=20)]
    engine.submit(requests)
    for step in range(12):
        engine.step()
        engine.cancel_requests([requests[step % 8]])
    engine.cancel_requests(requests)
    assert not engine.is_busy
    assert engine.get_load().used == 0
    assert {request.finish_reason for request in requests} == {"cancelled"}


def test_a_cache_is_planned_and_says_what_does_not_fit(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=4, max_len=128, cache_tokens=64)
    assert engine.max_len == 64
    with pytest.raises(DataError, match="the prompt has 64 tokens; with an answer at most 64 fit"):
        engine.request([1] * 64, greedy(1))
    assert engine.request([1] * 60, greedy(100)).max_answer_tokens == 4
    with pytest.raises(DataError, match="room for 8 tokens"):
        Engine(model, tokenizer, max_batch=4, max_len=128, cache_tokens=8)


def test_changed_weights_need_forget(tokenizer):
    from anabatic_testing.random_models import build_random_model

    changing = build_random_model(len(tokenizer), seed=3)
    engine = Engine(changing, tokenizer, max_batch=1, max_len=128)
    prompt = some(tokenizer, 1, 6, beginning=64)[0]
    before = engine.generate([prompt], greedy(12), [])[0].ids
    changing.load_state_dict(build_random_model(len(tokenizer), seed=4).state_dict())
    engine.clear_prefix_cache()
    after = engine.generate([prompt], greedy(12), [])[0].ids
    assert after == alone(changing, tokenizer, [prompt], [greedy(12)])[0] != before


def test_a_stream_that_somebody_else_ended_is_still_whole(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=2, max_len=128)
    prompt, other = some(tokenizer, 2, 7)
    sampling = Sampling(temperature=1.0, seed=2, max_new_tokens=8)
    whole = engine.generate([prompt], sampling, [])[0].text
    request = engine.request(prompt, sampling, [])
    engine.submit([request])
    pieces = engine.follow(request)
    text = next(pieces)
    engine.generate([other], greedy(30), [])
    assert request.finish_reason == "length"
    assert text + "".join(pieces) == whole
