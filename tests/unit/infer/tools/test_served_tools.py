"""Calls of tools over HTTP: whole and streamed, as OpenAI's client reads them."""

from __future__ import annotations

import importlib.util
import json

import openai
import pytest

from anabatic.infer.engine import Engine
from anabatic.infer.tool_call_parser import MAX_FORCED_CALLS
from anabatic_testing.random_models import build_byte_tokenizer
from unit.infer.scripted import says
from unit.infer.server.running import catalogue_of, serving

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a town", "parameters": {"type": "object", "required": ["town"]}},
}
ADD = {"type": "function", "function": {"name": "add"}}
USER = [{"role": "user", "content": "How is it in Oslo?"}]
CHAT = "/v1/chat/completions"
ONE = ("<tool_call>", '\n{"name": "wea', 'ther", "arguments": {"town": "Os', 'lo 你"}}\n', "</tool_call>")
TWO = ("Let me see.", "\n", "<tool_call>", '{"name": "add", "arguments": {}', "}", "</tool_call>", "\n<tool_call",
       '>{"name": "weather", "arguments": {}}</tool_call>')  # fmt: skip
TORN = ("<tool_call>", '\n{"name": "wea', "ther", "</tool_call>")
SAID = {"one": ONE, "two": TWO, "torn": TORN, "plain": ("It is ", "cold.")}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = build_byte_tokenizer(tmp_path_factory.mktemp("words"))
    tokenizer.add_tokens([piece for pieces in SAID.values() for piece in pieces if piece not in ("\n", "<tool_call>")])
    parts = {}
    for name, pieces in SAID.items():
        model = says(tokenizer, [piece for piece in pieces if piece != "\n"], max_len=1800)
        parts[name] = (Engine(model, tokenizer, max_batch=4, max_len=1800), model)
    with serving(catalogue_of(parts, new_tokens=1024)) as running:
        yield running


@pytest.fixture(scope="module")
def ask(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield lambda model, **more: client.chat.completions.create(
            **{"model": model, "messages": USER, "tools": [WEATHER, ADD], **more}
        )


def test_a_call(ask):
    choice = ask("one").choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"town": "Oslo 你"}
    assert call.id.startswith("call_") and call.type == "function"


def test_calls_behind_text(ask):
    choice = ask("two").choices[0]
    assert choice.message.content == "Let me see."
    assert [call.function.name for call in choice.message.tool_calls] == ["add", "weather"]
    alone = ask("two", parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in alone.message.tool_calls] == ["add"]


@pytest.mark.parametrize("more", [{}, {"max_tokens": 2}, {"max_tokens": 3}, {"stop": ["</tool"]}, {"stop": ["Oslo"]}])
@pytest.mark.parametrize("name", SAID)
def test_a_stream_says_what_the_whole_answer_says(ask, name, more):
    whole = ask(name, **more).choices[0]
    deltas = [chunk.choices[0] for chunk in ask(name, stream=True, **more)]
    text = "".join(one.delta.content or "" for one in deltas)
    assert text == (whole.message.content or "")
    calls = {}
    for entry in [call for one in deltas for call in one.delta.tool_calls or []]:
        if entry.index == len(calls):
            assert entry.id.startswith("call_") and entry.type == "function" and entry.function.arguments == ""
            calls[entry.index] = [entry.id, entry.function.name, ""]
        else:  # only the first part of a call has an id, a type and a name
            assert (entry.id, entry.type, entry.function.name) == (None, None, None) and entry.function.arguments
            assert entry.index == len(calls) - 1
            calls[entry.index][2] += entry.function.arguments
    assert [one[1:] for one in calls.values()] == [
        [call.function.name, call.function.arguments] for call in whole.message.tool_calls or []
    ]
    assert len({one[0] for one in calls.values()}) == len(calls)
    assert deltas[-1].finish_reason == whole.finish_reason


def test_the_client_joins_a_stream(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked = {"messages": USER, "tools": [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]}
        with client.chat.completions.stream(model="one", **asked) as stream:
            events = list(stream)
        message = stream.get_final_completion().choices[0].message
        whole = client.chat.completions.create(model="one", **asked).choices[0].message
    (call,) = message.tool_calls
    assert (message.content or None) == whole.content is None
    assert call.function.arguments == whole.tool_calls[0].function.arguments == '{"town": "Oslo 你"}'
    assert call.function.parsed_arguments == {"town": "Oslo 你"}
    sent = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert [piece for piece in sent if piece] == ['{"town": "Os', 'lo 你"}']  # as the tokens come
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.index, done.arguments) == ("weather", 0, call.function.arguments)


def test_what_is_malformed_or_not_offered_stays_text(ask):
    torn = ask("torn").choices[0]
    assert (torn.message.content, torn.finish_reason) == ("".join(TORN), "stop")
    for more in ({"tools": [ADD]}, {"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        choice = ask("one", **more).choices[0]
        assert choice.message.content == "".join(ONE) and choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_a_call_that_is_cut(ask):
    """Before its name is known it is text; then it is a call with the arguments that came."""
    cut = ask("one", max_tokens=2).choices[0]
    assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == ("".join(ONE[:2]), None, "length")
    cut = ask("one", max_tokens=3).choices[0]
    (call,) = cut.message.tool_calls
    assert (cut.message.content, cut.finish_reason) == (None, "length")
    assert (call.function.name, call.function.arguments) == ("weather", '{"town": "Os')


def test_the_conversation_goes_on_after_a_call(ask, server):
    call = ask("one").choices[0].message
    talk = [*USER, call.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "x", "content": "4 degrees"}]
    assert ask("plain", messages=talk).choices[0].message.content == "It is cold."
    served = server.catalogue.find_model("plain")
    from anabatic.infer.server.request_schema import ChatRequest

    asked = ChatRequest.model_validate({"messages": talk, "tools": [WEATHER]})
    ids, _ = server.catalogue.encode_conversation(served, asked.messages, asked.tools)
    prompt = served.engine.tokenizer.decode(ids)
    assert '{"name": "weather", "arguments": {"town": "Oslo 你"}}' in prompt
    assert "<tool_response>\n4 degrees\n</tool_response>" in prompt and "of a town" in prompt


WRONG = {
    "two of one name": ({"tools": [ADD, ADD]}, "two tools are called add"),
    "a name that is none": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    "no tools": ({"tools": [], "tool_choice": "required"}, "tools are not given"),
    "another tool": (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "not among the tools",
    ),
    "two forms": (
        {"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}, "one form",
    ),
}  # fmt: skip


@pytest.mark.parametrize("about", WRONG)
def test_wrong_requests(server, about):
    body, words = WRONG[about]
    answer = server.post(CHAT, {"messages": USER, **body})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_half_characters_and_deep_nesting(server):
    deep = current = {}
    for _ in range(600):
        current["a"] = current = {}
    for function in ({"name": "add", "description": "\ud800"}, {"name": "add", "parameters": deep}):
        sent = json.dumps({"messages": USER, "max_tokens": 2, "tools": [{"type": "function", "function": function}]})
        with server.client() as client:
            answer = client.post(CHAT, content=sent, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400)


def test_a_template_without_tools_is_told(server, monkeypatch):
    served = server.catalogue.find_model("plain")
    monkeypatch.setitem(vars(served), "shows_tools", False)
    answer = server.post(CHAT, {"model": "plain", "messages": USER, "tools": [ADD]})
    assert answer.status_code == 400 and "does not tell the model of tools" in answer.json()["error"]["message"]


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="the extra constrain is not installed")
def test_a_call_that_has_to_come(ask):
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        tool = {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {
                    "type": "object",
                    "properties": {"x": {"enum": [7]}},
                    "required": ["x"],
                    "additionalProperties": False,
                },
            },
        }
        got = ask("plain", tools=[tool], tool_choice=choice, max_tokens=64, parallel_tool_calls=False).choices[0]
        (call,) = got.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 7})
        assert (got.message.content, got.finish_reason) == (None, "tool_calls")


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="the extra constrain is not installed")
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_bounded_and_those_that_were_whole_outlive_a_cut(server, stream):
    """The only call that may come is always the same; the model, left to itself, repeats it."""
    tool = {"type": "function", "function": {"name": "a", "parameters": {"const": {}, "type": "object"}}}
    chosen = {"model": "plain", "messages": USER, "tools": [tool], "tool_choice": "required", "seed": 1}
    repeats = {
        "logit_bias": {str(server.catalogue.find_model("plain").engine.tokenizer.convert_tokens_to_ids("]")): -100}
    }

    def asked(**more):
        body = {**chosen, **more, "stream": stream}
        if not stream:
            (choice,) = server.post(CHAT, body).json()["choices"]
            return choice["finish_reason"], choice["message"]["content"], len(choice["message"].get("tool_calls", []))
        lines = [line[6:] for line in server.post(CHAT, body).text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0] for line in lines]
        text = "".join(one["delta"].get("content") or "" for one in deltas)
        entries = [entry for one in deltas for entry in one["delta"].get("tool_calls", [])]
        return deltas[-1]["finish_reason"], text or None, sum("id" in entry for entry in entries)

    end, text, count = asked(max_tokens=90, **repeats)
    assert (end, text) == ("length", None) and count >= 2
    assert asked(max_tokens=900, **repeats) == ("tool_calls", None, MAX_FORCED_CALLS)
    assert asked(max_tokens=900, parallel_tool_calls=False, **repeats) == ("tool_calls", None, 1)
    end, text, count = asked(max_tokens=5)
    assert (end, count) == ("length", 0) and text  # what was begun can be read


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is not None, reason="the extra constrain is installed")
def test_a_call_that_has_to_come_needs_the_library(server):
    answer = server.post(CHAT, {"messages": USER, "tools": [ADD], "tool_choice": "required"})
    assert answer.status_code == 400 and "anabatic[constrain]" in answer.json()["error"]["message"]
