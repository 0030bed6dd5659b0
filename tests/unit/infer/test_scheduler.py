"""How long a step may be: it ends when nobody waits for it, and reads little beside those who are being answered."""

from __future__ import annotations

import threading

import pytest

from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.infer.scheduler import PromptPace, RequestScheduler
from anabatic_testing.random_models import build_random_model
from unit.infer.server.running import catalogue_of, serving
from unit.infer.server.test_limits import CHAT, figure, sent, until


def greedy(tokens):
    return Sampling(temperature=0.0, max_new_tokens=tokens)


def own_model(tokenizer):
    return build_random_model(len(tokenizer), seed=0)


def test_a_step_ends_at_the_next_layer_when_nobody_waits_for_it(tokenizer):
    model = own_model(tokenizer)
    engine = Engine(model, tokenizer, max_batch=2, max_len=128)
    prompt = [token % 90 for token in range(100)]
    request = engine.request(prompt, greedy(5), [])
    layers = model.base_model.layers
    read = []
    hooks = [
        layers[0].register_forward_hook(lambda *_: setattr(request, "is_abandoned", True)),
        layers[1].mlp.register_forward_hook(lambda *_: read.append(1)),
    ]
    engine.submit([request])
    assert engine.step() == []
    assert (read, request.computed_tokens, engine.get_load().steps) == ([], 0, 0)
    engine.cancel_requests([request])
    assert (engine.is_busy, engine.get_load().used, engine.get_load().idle) == (False, 0, 0)
    for hook in hooks:
        hook.remove()
    again = Engine(model, tokenizer, max_batch=2, max_len=128, direct=False)  # as the other, which has met hooks
    expected = again.generate([prompt], greedy(5), [])[0]
    found = engine.generate([prompt], greedy(5), [])[0]
    assert (found.ids, found.logprobs) == (expected.ids, expected.logprobs)


def test_a_step_without_modules_ends_when_nobody_waits_for_it(tokenizer):
    engine = Engine(own_model(tokenizer), tokenizer, max_batch=2, max_len=128)
    expected = engine.generate([[5, 6, 7]], greedy(5), [])[0].ids
    assert engine.runner.runs_directly
    steps = engine.get_load().steps
    request = engine.request([5, 6, 7], greedy(5), [])
    request.is_abandoned = True
    engine.submit([request])
    assert engine.step() == []
    assert (request.computed_tokens, engine.get_load().steps) == (0, steps)
    request.is_abandoned = False
    while engine.is_busy:
        engine.step()
    assert request.ids == expected


def test_a_step_that_somebody_waits_for_goes_on(tokenizer):
    model = own_model(tokenizer)
    engine = Engine(model, tokenizer, max_batch=2, max_len=128)
    gone, waits = (engine.request([first, 5, 6], greedy(5), []) for first in (3, 4))
    expected = engine.generate([waits.prompt], greedy(5), [])[0].ids
    gone.is_abandoned = True
    engine.submit([gone, waits])
    while not waits.finish_reason:
        engine.step()
    assert waits.ids == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_place_is_free_while_a_prompt_is_still_read(tokenizer, stream):
    model = own_model(tokenizer)
    engine = Engine(model, tokenizer, max_batch=1, max_len=128)
    begun, goes_on, read = threading.Event(), threading.Event(), []

    def wait(*_):
        begun.set()
        assert goes_on.wait(240)

    hooks = [
        model.base_model.layers[0].register_forward_hook(wait),
        model.base_model.layers[1].mlp.register_forward_hook(lambda *_: read.append(1)),
    ]
    with serving(catalogue_of({"one": (engine, model)})) as running:
        body = {"messages": [{"role": "user", "content": "abc" * 20}], "max_tokens": 16, "stream": stream}
        with sent(running, CHAT, body):
            assert begun.wait(240)
        until(lambda: figure(running, 'anabatic_requests_total{end="gone",model="one"}') == 1)
        goes_on.set()
        until(lambda: not engine.is_busy)
        assert (read, engine.get_load().steps) == ([], 0)
        for hook in hooks:
            hook.remove()
        assert running.post(CHAT, {**body, "stream": False}).status_code == 200


def request_of(engine, tokens, first=0):
    return engine.request([(first + at) % 90 for at in range(tokens)], greedy(9), [])


def test_little_is_read_beside_those_who_are_being_answered(tokenizer):
    model = build_random_model(len(tokenizer), max_len=1024)
    engine = Engine(model, tokenizer, max_batch=4, max_len=1024)
    schedule = RequestScheduler(256, 4, 600)
    schedule.max_shared_prompt_tokens = 100

    def step():
        rows = schedule.plan_step()
        for request, row in rows.items():
            schedule.mark_computed(request, row.start + len(row.tokens))
            if row.should_return_logits:
                request.append_token(1, 0.0)
        return [len(row.tokens) for row in rows.values()]

    first, second = request_of(engine, 700), request_of(engine, 350, 7)
    schedule.waiting.extend([first, second])
    assert step() == [600]  # alone: as fast as it can be; nobody is kept waiting but who has to anyway
    assert step() == [100]
    assert step() == [1, 100]
    short = request_of(engine, 20, 30)
    schedule.waiting.append(short)
    assert step() == [1, 100]
    assert step() == [1, 100]
    assert step() == [1, 50, 20]
    assert step() == [1, 1, 1]


def test_the_pace_fits_steps_into_the_time_that_they_may_take():
    def seconds(tokens):
        return 0.05 + 0.004 * tokens

    pace = PromptPace(0.4)
    assert pace.max_prompt_tokens is None
    pace.add_step(3, seconds(3))
    assert pace.max_prompt_tokens == 64
    for _ in range(20):
        pace.add_step(pace.max_prompt_tokens, seconds(pace.max_prompt_tokens))
    assert 0.3 < seconds(pace.max_prompt_tokens) <= 0.41
    pace.add_step(2048, seconds(2048))
    assert 0.3 < seconds(pace.max_prompt_tokens) <= 0.45


def test_an_engine_measures_its_pace_where_it_is_asked_to(tokenizer):
    model = own_model(tokenizer)
    for seconds, known in ((None, False), (0.4, True)):
        engine = Engine(model, tokenizer, max_batch=2, max_len=128, step_seconds=seconds)
        engine.generate([[3, 4, 5]], greedy(3), [])
        assert (engine._schedule.max_shared_prompt_tokens is not None) == known
