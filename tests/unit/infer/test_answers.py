"""What a request may ask for: stop strings, penalties, log-probabilities; and forms of the answer where they exist."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic.infer import constrained_decoding
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling, sample_tokens
from anabatic.infer.text_stream import StopStringFilter


@pytest.mark.process
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.randoms())
@settings(max_examples=200, deadline=None)
def test_what_passes_is_the_text_before_the_first_stop_string(text, stops, random):
    stream, passed, at = StopStringFilter(stops), "", 0
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    while at < len(text) and stream.matched is None:
        size = random.randint(0, 3)
        passed += stream.push_text(text[at : at + size])
        at += size
        held = text[:at][len(passed) :]
        if stream.matched is None:
            assert not any(stop in passed for stop in stops)
            assert not held or any(stop.startswith(held) for stop in stops)
    if not ends:
        assert passed + stream.flush() == text
        return
    # What comes whole first ends the text; of several in one piece the one that begins first.
    assert stream.matched in stops
    assert passed == text[: text.index(stream.matched)] or passed + stream.matched in text
    assert not any(stop in passed for stop in stops)


def test_a_stop_string_ends_the_answer_and_never_shows(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=4, max_len=128)
    free = engine.generate([[40, 41]], Sampling(temperature=1.0, seed=1, max_new_tokens=60), [])[0]
    stop = free.text[20:24]
    sampling = Sampling(temperature=1.0, seed=1, max_new_tokens=60, stop=["nowhere", stop])
    cut = engine.generate([[40, 41]], sampling, [])[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.ids == free.ids[: len(cut.ids)]
    assert len(cut.ids) < len(free.ids)
    request = engine.request([40, 41], sampling, [])
    engine.submit([request])
    shown = ""
    for piece in engine.follow(request):
        shown += piece
        assert free.text.startswith(shown)
        assert stop not in shown
    assert shown == cut.text
    assert request.stop_string == stop


def test_penalties_and_cuts_are_those_of_transformers(model, tokenizer):
    """The likeliest token and the tokens that can be drawn, step by step."""
    import transformers as hf

    prompt = [30, 31, 32, 30]
    sampling = Sampling(temperature=0.8, top_k=12, top_p=0.9, min_p=0.1, repetition_penalty=1.7, max_new_tokens=1)
    engine = Engine(model, tokenizer, max_batch=1, max_len=32)
    logits = torch.randn(1, len(tokenizer), generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 30] = 9.0
    ids = torch.tensor([prompt])
    wanted = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    for warp in (
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(12),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.1),
    ):
        wanted = warp(ids, wanted)
    shares = torch.softmax(wanted, -1)[0]
    request = engine.request(prompt, sampling, [])
    counts = torch.zeros(len(tokenizer))
    for place in range(2000):
        request.random = type("Even", (), {"random": lambda self, at=place: (at + 0.5) / 2000})()
        counts[sample_tokens(logits, [request])[0][0]] += 1
    torch.testing.assert_close(counts / 2000, shares, rtol=0, atol=2e-3)
    greedy = engine.request(prompt, Sampling(temperature=0.0, repetition_penalty=1.7), [])
    expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone()).argmax().item()
    assert sample_tokens(logits, [greedy])[0][0] == expected


def test_a_penalty_counts_the_prompt_and_the_answer_like_transformers_do(model, tokenizer):
    prompt = [30, 31, 32, 33]
    engine = Engine(model, tokenizer, max_batch=2, max_len=64)
    free, held = engine.generate(
        [prompt] * 2, [Sampling(temperature=0.0, max_new_tokens=24, repetition_penalty=p) for p in (1.0, 1.4)], []
    )
    out = model_of_transformers(model).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 4, dtype=torch.int64),
        max_new_tokens=24,
        do_sample=False,
        repetition_penalty=1.4,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert held.ids == out[0, 4:].tolist()
    assert held.ids != free.ids


def model_of_transformers(model):
    config = model.config.__class__(**model.config.to_dict())
    config._attn_implementation = "eager"
    plain = type(model)(config).eval()
    plain.load_state_dict(model.state_dict())
    return plain


def test_log_probabilities_of_the_likeliest(model, tokenizer):
    engine = Engine(model, tokenizer, max_batch=2, max_len=64)
    prompt = [30, 31, 32]
    samplings = [Sampling(temperature=1.0, seed=0, max_new_tokens=6, top_logprobs=n) for n in (3, 0)]
    asked, other = engine.generate([prompt, prompt], samplings, [])
    assert other.top_logprobs == []
    assert asked.ids == other.ids
    logits = model_of_transformers(model)(torch.tensor([prompt + asked.ids])).logits[0, 2:-1].log_softmax(-1)
    values, tokens = logits.topk(3)
    assert [[token for token, _ in row] for row in asked.top_logprobs] == tokens.tolist()
    found = torch.tensor([[value for _, value in row] for row in asked.top_logprobs])
    torch.testing.assert_close(found, values.detach(), rtol=1e-3, atol=1e-4)


def test_forms_without_the_library_name_the_extra(model, tokenizer):
    if form_library():
        pytest.skip("llguidance is installed")
    engine = Engine(model, tokenizer, max_batch=1, max_len=64)
    with pytest.raises(ConfigError, match="need llguidance") as error:
        engine.request([1], Sampling(choices=["yes", "no"]))
    assert error.value.hint == constrained_decoding.INSTALL_HINT


def form_library():
    try:
        import llguidance
    except ImportError:
        return None
    return llguidance


@pytest.fixture
def formed(model, tokenizer):
    if not form_library():
        pytest.skip("llguidance is not installed (pip install 'anabatic[constrain]')")
    engine = Engine(model, tokenizer, max_batch=6, max_len=128)

    def answer(**settings):
        samplings = [Sampling(temperature=1.0, seed=seed, max_new_tokens=90, **settings) for seed in range(6)]
        return engine.generate([[40, 41]] * 6, samplings)

    return answer


def test_choices(formed):
    found = formed(choices=["yes", "yesterday", '"no"\n', "你好"])
    assert {one.text for one in found} <= {"yes", "yesterday", '"no"\n', "你好"}
    assert {one.finish_reason for one in found} == {"stop"}
    assert len({one.text for one in found}) > 1


def test_json_of_a_schema(formed):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "maximum": 150, "minimum": 0},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    assert formed(json_schema="true")
    for one in formed(json_schema=json.dumps(schema)):
        assert not re.search(r"[ \n\r\t]{25}", one.text)  # 12 behind a part, 12 before the next
        if one.finish_reason == "stop":
            value = json.loads(one.text)
            assert set(value) == {"name", "age"}
            assert isinstance(value["age"], int)


def test_an_expression(formed):
    for one in formed(regex="[0-9]{3}-[ab]+c"):
        assert one.finish_reason == "stop" or one.text[3] == "-"
        assert one.text[:3].isdigit()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": '{"type": "nonsense"}'}, "json_schema cannot be used"),
        ({"regex": "(["}, "regex cannot be used"),
    ],
)
def test_forms_that_cannot_be_read(formed, settings, message):
    with pytest.raises(ConfigError, match=message):
        formed(**settings)
