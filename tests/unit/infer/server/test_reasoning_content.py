"""Reasoning of a model that writes it: `reasoning_content` of whole answers and of streamed ones, never `content`."""

from __future__ import annotations

import json

import pytest

from anabatic.infer.engine import Engine
from anabatic.infer.server.responses_schema import ResponsesRequest
from anabatic_testing.random_models import build_byte_tokenizer
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


@pytest.mark.parametrize(
    ("model", "reasoning", "content"), [("both", "xy", "b"), ("cut", "xy", ""), ("none", "", "xb")]
)
def test_responses(thinking, model, reasoning, content):
    """Read by the openai package, whole and streamed; its items are input of the next question."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none") as client:
        answer = client.responses.create(model=model, input="a")
        assert [item.type for item in answer.output] == ["reasoning"] * bool(reasoning) + ["message"]
        assert answer.output_text == content
        assert answer.usage.output_tokens_details.reasoning_tokens == len(reasoning)
        if reasoning:
            item = answer.output[0]
            assert (item.content[0].text, item.content[0].type, item.summary) == (reasoning, "reasoning_text", [])
        events = list(client.responses.create(model=model, input="a", stream=True))
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == reasoning and events[-1].type == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        assert [item.type for item in last.output] == [item.type for item in answer.output]
        assert {item.status for item in last.output} == {"completed"}
        again = [{"role": "user", "content": "a"}, *answer.output, {"role": "user", "content": "a"}]
        assert client.responses.create(model=model, input=again).status == "completed"


def test_an_answer_is_taken_back(thinking):
    """Clients send whole messages again; what the template shows of their reasoning is its own affair."""
    message = thinking.post("/v1/chat/completions", {**ASKED, "model": "both"}).json()["choices"][0]["message"]
    again = {"model": "both", "messages": [*ASKED["messages"], message, *ASKED["messages"]]}
    answer = thinking.post("/v1/chat/completions", again)
    assert answer.status_code == 200, answer.text
    with_reasoning = answer.json()["usage"]["prompt_tokens"]
    del message["reasoning_content"]
    assert thinking.post("/v1/chat/completions", again).json()["usage"]["prompt_tokens"] <= with_reasoning
    wrong = {"model": "both", "messages": [*ASKED["messages"], message | {"reasoning_content": 3}]}
    assert thinking.post("/v1/chat/completions", wrong).status_code == 400


def test_reasoning_items_go_to_the_turn_behind_them():
    request = ResponsesRequest.model_validate(
        {
            "model": "both",
            "input": [
                {"role": "user", "content": "a"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "xy"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "3"},
            ],
        }
    )
    turns = [message.to_template_dict() for message in request.to_chat_request().messages]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
    assert [turn.get("reasoning_content") for turn in turns] == [None, "xy", None]
