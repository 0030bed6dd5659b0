"""Penalties, biases and variables of the chat template over HTTP."""

from __future__ import annotations

import openai
import pytest

from anabatic.infer.engine import Engine
from anabatic_testing.random_models import build_byte_tokenizer
from unit.infer.server.running import catalogue_of, serving

USER = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ colour }}|"
)


@pytest.fixture(scope="module")
def server(engine_parts, tmp_path_factory):
    own = build_byte_tokenizer(tmp_path_factory.mktemp("own"))
    own.chat_template = TEMPLATE
    model = engine_parts["one"][1]
    parts = {**engine_parts, "own": (Engine(model, own, max_batch=2, max_len=128), model)}
    with serving(catalogue_of(parts)) as running:
        yield running


@pytest.fixture(scope="module")
def ask(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield lambda **more: client.chat.completions.create(**{"model": "one", "messages": USER, **more})


def test_a_bias_forces_and_forbids(ask, tokenizer):
    (letter,) = tokenizer("x", add_special_tokens=False)["input_ids"]
    assert ask(logit_bias={str(letter): 100}, max_tokens=5).choices[0].message.content == "xxxxx"
    free = ask(logprobs=True, max_tokens=1).choices[0].message.content
    first = tokenizer(free, add_special_tokens=False)["input_ids"][0]
    assert ask(logit_bias={str(first): -100}, max_tokens=1).choices[0].message.content != free


def test_penalties_change_what_is_said_again(ask, tokenizer):
    letters = [tokenizer(one, add_special_tokens=False)["input_ids"][0] for one in "xy"]
    bias = dict.fromkeys(map(str, letters), 100)
    free = ask(logit_bias=bias, max_tokens=24).choices[0].message.content
    held = ask(logit_bias=bias, max_tokens=24, frequency_penalty=2).choices[0].message.content
    assert set(free) | set(held) == {"x", "y"} == set(held)
    assert abs(held.count("x") - held.count("y")) < abs(free.count("x") - free.count("y"))


def _prompt(server, **more):
    from anabatic.infer.server.request_schema import ChatRequest

    asked = ChatRequest.model_validate({"messages": USER, **more})
    served = server.catalogue.find_model("own")
    (request,) = server.catalogue.make_chat_requests(served, asked)
    return served.engine.tokenizer.decode(request.prompt)


def test_variables_of_the_template(server):
    assert _prompt(server) == "hello||||"
    assert _prompt(server, reasoning_effort="high") == "hello|high|True||"
    assert _prompt(server, reasoning_effort="none") == "hello|none|False||"
    given = {"enable_thinking": True, "colour": "blue"}
    assert _prompt(server, reasoning_effort="minimal", chat_template_kwargs=given) == "hello|minimal|True|blue|"
    body = {"model": "own", "messages": USER, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    assert server.post("/v1/chat/completions", body).status_code == 200
