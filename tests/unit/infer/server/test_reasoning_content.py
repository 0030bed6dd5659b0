"""Reasoning of a model that writes it: `reasoning_content` of whole answers and of streamed ones, never `content`."""

from __future__ import annotations

import json

import pytest

from anabatic.infer.engine import Engine
from anabatic.testing.random_models import build_byte_tokenizer
from unit.infer.scripted import says
from unit.infer.server.running import catalogue_of, serving

ASKED = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    tokenizer = build_byte_tokenizer(tmp_path_factory.mktemp("thinking"))
    tokenizer.add_tokens(["<think>", "</think>"])
    answers = {
        "both": ["<think>", "x", "y", "</think>", "b"],
        "cut": ["<think>", "x", "y"],
        "none": ["x", "b"],
        "empty": ["<think>", "</think>", "b"],
    }
    models = {name: says(tokenizer, pieces) for name, pieces in answers.items()}
    parts = {name: (Engine(model, tokenizer, max_batch=2, max_len=256), model) for name, model in models.items()}
    with serving(catalogue_of(parts)) as running:
        yield running


@pytest.mark.parametrize(
    ("model", "reasoning", "content"),
    [("both", "xy", "b"), ("cut", "xy", ""), ("none", None, "xb"), ("empty", None, "b")],
)
def test_whole_and_streamed(thinking, model, reasoning, content):
    message = thinking.post("/v1/chat/completions", {**ASKED, "model": model}).json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    answer = thinking.post("/v1/chat/completions", {**ASKED, "model": model, "stream": True, "logprobs": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (reasoning or "")
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    tokens = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert len(tokens) == len(set(tokens)) >= 2 and choices[-1]["finish_reason"] == "stop"


def test_a_text_that_continues_keeps_its_tags(thinking):
    (prompt,) = [thinking.post("/v1/completions", {"model": "both", "prompt": "\n", "max_tokens": 9}).json()]
    assert prompt["choices"][0]["text"].startswith("<think>xy</think>b")
