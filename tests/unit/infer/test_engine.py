"""The engine against transformers' own `generate` and against itself with other neighbours in the batch."""

from __future__ import annotations

from random import Random

import pytest
import torch
from transformers import Qwen3ForCausalLM

from anabatic.core.errors import DataError, Failure
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import GREEDY, Sampling
from anabatic_testing.random_models import build_random_model


def prompts(number, size, seed=0, longest=20):
    rng = Random(seed)
    return [[rng.randrange(size) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def greedy(tokens):
    return Sampling(temperature=0.0, max_new_tokens=tokens)


def plain_generate(model, prompt, tokens, stop_ids):
    """transformers' own greedy generation with its own attention on the same weights."""
    config = model.config.__class__(**model.config.to_dict())
    config._attn_implementation = "eager"
    plain = Qwen3ForCausalLM(config).eval()
    plain.load_state_dict(model.state_dict())
    out = plain.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_greedy_is_transformers_generate(tokenizer, kv_heads, max_batch):
    model = build_random_model(len(tokenizer), seed=kv_heads, kv_heads=kv_heads)
    engine = Engine(model, tokenizer, max_batch=max_batch, max_len=64)
    given = prompts(7, len(tokenizer))
    answers = engine.generate(given, greedy(16), stop_ids=[])
    for prompt, answer in zip(given, answers, strict=True):
        assert answer.ids == plain_generate(model, prompt, 16, [])
        assert answer.finish_reason == "length"
    assert len({tuple(answer.ids) for answer in answers}) > 3


def test_stop_ids_end_an_answer_like_transformers_do(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=4, max_len=64)
    given = prompts(8, len(tokenizer), seed=1)
    free = engine.generate(given, greedy(12), stop_ids=[])
    stops = {answer.ids[4] for answer in free[:3]}
    for prompt, answer in zip(given, engine.generate(given, greedy(12), stop_ids=stops), strict=True):
        assert answer.ids == plain_generate(model, prompt, 12, stops)
        stopped = answer.ids[-1] in stops
        assert answer.finish_reason == ("stop" if stopped else "length")
        shown = answer.ids[:-1] if stopped else answer.ids
        assert answer.text == tokenizer.decode(shown, skip_special_tokens=True)


def test_what_a_seed_draws_does_not_depend_on_the_neighbours(model, tokenizer):
    given = prompts(6, len(tokenizer), seed=2)
    samplings = [Sampling(temperature=0.9, top_k=20, top_p=0.95, seed=n, max_new_tokens=4 + 3 * n) for n in range(6)]
    together = Engine(model, tokenizer, max_batch=6, max_len=64).generate(given, samplings, [])
    narrow = Engine(model, tokenizer, max_batch=2, max_len=64)
    in_turn = narrow.generate(list(reversed(given)), list(reversed(samplings)), [])
    alone = [narrow.generate([prompt], each, [])[0] for prompt, each in zip(given, samplings, strict=True)]
    assert [answer.ids for answer in together] == [answer.ids for answer in reversed(in_turn)]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert [len(answer.ids) for answer in together] == [4, 7, 10, 13, 16, 19]


def test_slots_are_reused_and_freed(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=2, max_len=40)
    running = []
    requests = [engine.request(prompt, greedy(1 + n % 5), []) for n, prompt in enumerate(prompts(9, len(tokenizer)))]
    engine.submit(requests)
    while engine.is_busy:
        engine.step()
        running.append(sum(request.is_running for request in requests))
    assert max(running) <= 2
    assert [len(request.ids) for request in requests] == [1 + n % 5 for n in range(9)]
    assert len(running) < sum(1 + n % 5 for n in range(9))


def test_log_probabilities_are_the_models_own(model, tokenizer):
    prompt = prompts(1, len(tokenizer), seed=3)[0]
    engine = Engine(model, tokenizer, max_batch=1, max_len=64)
    answer = engine.generate([prompt], Sampling(temperature=2.0, top_k=5, seed=0, max_new_tokens=8), [])[0]
    config = model.config.__class__(**model.config.to_dict())
    config._attn_implementation = "eager"
    plain = Qwen3ForCausalLM(config).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + answer.ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=1e-3, atol=1e-4)


def test_stream_is_generate_in_pieces(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=2, max_len=64)
    for prompt in prompts(4, len(tokenizer), seed=4):
        sampling = Sampling(temperature=1.0, seed=5, max_new_tokens=40)
        request = engine.request(prompt, sampling)
        engine.submit([request])
        assert "".join(engine.follow(request)) == engine.generate([prompt], sampling)[0].text
    assert not engine.is_busy


def test_a_stream_left_early_frees_its_slot_and_others_run_meanwhile(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=2, max_len=64)
    first, second = prompts(2, len(tokenizer), seed=6)
    expected = engine.generate([second], greedy(10), [])[0].ids
    request = engine.request(first, greedy(40), [])
    engine.submit([request])
    pieces = engine.follow(request)
    next(pieces)
    assert engine.generate([second], greedy(10), [])[0].ids == expected
    pieces.close()
    assert request.finish_reason == "cancelled"
    assert not engine.is_busy
    assert engine.generate([second, second], greedy(10), [])[1].ids == expected


def test_an_answer_ends_where_the_cache_ends(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=1, max_len=16)
    answer = engine.generate([[20] * 10], greedy(100), [])[0]
    assert len(answer.ids) == 6
    assert answer.finish_reason == "length"
    assert answer.ids == plain_generate(model, [20] * 10, 6, [])


@pytest.mark.parametrize("size", [16, 17, 400])
def test_a_prompt_without_room_is_refused_with_numbers(model, tokenizer, size):
    engine = Engine(model, tokenizer, max_batch=1, max_len=16)
    with pytest.raises(DataError, match=f"prompt 2 has {size} tokens; with an answer at most 16 fit") as error:
        engine.generate([[5], [5] * size], GREEDY)
    assert "15 tokens" in error.value.hint
    assert not engine.is_busy


def test_bad_arguments(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=1, max_len=16)
    with pytest.raises(DataError, match="prompt 1 is empty"):
        engine.generate([[]], GREEDY)
    with pytest.raises(DataError, match="1 sampling settings for 2 prompts"):
        engine.generate([[1], [2]], [GREEDY])
    with pytest.raises(DataError, match="max_len is 1000, the model has 128 positions"):
        Engine(model, tokenizer, max_batch=1, max_len=1000)
    assert engine.generate([], GREEDY) == []


def test_logits_that_are_no_numbers_are_a_failure_and_leave_the_engine_usable(tokenizer):
    model = build_random_model(len(tokenizer))
    engine = Engine(model, tokenizer, max_batch=2, max_len=32)
    good = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(Failure, match="not numbers"):
        engine.generate([[3, 4], [5], [6]], GREEDY)
    assert not engine.is_busy
    with torch.no_grad():
        model.lm_head.weight.copy_(good)
    assert len(engine.generate([[3, 4], [5], [6]], greedy(4), [])) == 3


def test_a_model_in_training_mode_is_handed_back_in_training_mode(tokenizer):
    model = build_random_model(len(tokenizer)).train()
    Engine(model, tokenizer, max_batch=1, max_len=32).generate([[3]], greedy(3))
    assert model.training
