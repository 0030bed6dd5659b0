"""`/v1/responses` as OpenAI's client reads it: whole, streamed, with functions and their results, with forms."""

from __future__ import annotations

import importlib.util
import json

import openai
import pytest

from anabatic.infer.engine import Engine
from anabatic.infer.server.responses_schema import ResponsesRequest
from anabatic_testing.random_models import build_byte_tokenizer
from unit.infer.scripted import says
from unit.infer.server.running import catalogue_of, serving

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "description": "of a town", "parameters": {"type": "object"}}
ADD = {"type": "function", "name": "add"}
CALLS = ("Let me see.", "<tool_call>", '{"name": "add", "arguments": {}', "}", "</tool_call>", "\n<tool_call",
         '>{"name": "weather", "arguments": {"town": "Oslo"}}</tool_call>')  # fmt: skip
BITS = ("<tool_call>", '{"name": "wea', 'ther', '", "arguments": {"to', 'wn": "Os', 'lo 你"', "}}</tool_call>",
        "\n\nDone.", '<tool_call>{"name": "add"}</tool_call>')  # fmt: skip
SAID = {"calls": CALLS, "plain": ("It is ", "cold."), "bits": BITS}
NEEDS_FORMS = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="constrain is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    tokenizer = build_byte_tokenizer(tmp_path_factory.mktemp("words"))
    tokenizer.add_tokens([piece for pieces in SAID.values() for piece in pieces if piece != "<tool_call>"])
    parts = {}
    for name, pieces in SAID.items():
        model = says(tokenizer, list(pieces))
        parts[name] = (Engine(model, tokenizer, max_batch=4, max_len=900), model)
    with serving(catalogue_of(parts, new_tokens=64)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_text(client):
    answer = client.responses.create(model="plain", input="How is it?", instructions="Be short.")
    assert (answer.output_text, answer.status, answer.error) == ("It is cold.", "completed", None)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.id.startswith("resp_") and answer.model == "plain" and answer.instructions == "Be short."
    used = answer.usage
    assert used.total_tokens == used.input_tokens + used.output_tokens and used.output_tokens == 3
    assert answer.to_dict()["store"] is False


def test_an_answer_that_is_cut(client):
    answer = client.responses.create(model="plain", input="How?", max_output_tokens=1)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == ("It is ", "incomplete")
    *_, last = client.responses.create(model="plain", input="How?", max_output_tokens=1, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "It is ")


def test_calls_of_functions(client):
    answer = client.responses.create(model="calls", input="Oslo?", tools=[WEATHER, ADD])
    text, first, second = answer.output
    assert (text.content[0].text, first.name, second.name) == ("Let me see.", "add", "weather")
    assert json.loads(second.arguments) == {"town": "Oslo"} and second.call_id.startswith("call_")
    assert [tool.name for tool in answer.tools] == ["weather", "add"] and answer.status == "completed"


@pytest.mark.parametrize("model", SAID)
def test_a_stream_tells_what_the_whole_answer_says(client, model):
    whole = client.responses.create(model=model, input="Oslo?", tools=[WEATHER, ADD])
    events = list(client.responses.create(model=model, input="Oslo?", tools=[WEATHER, ADD], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    done = [event.item for event in events if event.type == "response.output_item.done"]
    said = events[-1].response

    def plain(items):
        return [item.to_dict() | {"id": "", "call_id": ""} for item in items]

    assert plain(done) == plain(said.output) == plain(whole.output)
    assert said.id == events[0].response.id and said.usage.total_tokens == whole.usage.total_tokens
    places = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert places == list(range(len(said.output)))


CALL_EVENTS = ["function_call_arguments.done", "output_item.done"]
MESSAGE_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
                  "content_part.done", "output_item.done"]  # fmt: skip


def test_the_events_of_calls(client):
    events = list(client.responses.create(model="bits", input="Oslo?", tools=[WEATHER, ADD], stream=True))
    delta = ["function_call_arguments.delta"]
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", *delta * 4, *CALL_EVENTS),
        *MESSAGE_EVENTS,
        *("output_item.added", *delta, *CALL_EVENTS),
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.output_index for event in events[2:-1]] == [0] * 7 + [1] * 6 + [2] * 4
    added, done = events[2], events[8]
    assert (added.item.name, added.item.arguments, added.item.status) == ("weather", "", "in_progress")
    assert done.item.to_dict() == added.item.to_dict() | {"arguments": '{"town": "Oslo 你"}', "status": "completed"}
    assert {event.item_id for event in events[3:8]} == {added.item.id}
    assert [event.delta for event in events[3:7]] == ['{"to', 'wn": "Os', 'lo 你"', "}"]
    assert (events[7].name, events[7].arguments) == ("weather", done.item.arguments)
    assert [item.type for item in events[-1].response.output] == ["function_call", "message", "function_call"]
    assert (events[-1].response.output[2].name, events[-1].response.output[2].arguments) == ("add", "{}")


@pytest.mark.parametrize("tokens", range(1, len(BITS) + 1))
def test_a_stream_that_is_cut(client, tokens):
    asked = {"model": "bits", "input": "Oslo?", "tools": [WEATHER, ADD], "max_output_tokens": tokens}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    said = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in said.output]
    for ours, other in zip(said.output, whole.output, strict=True):
        assert ours.to_dict() | {"id": "", "call_id": ""} == other.to_dict() | {"id": "", "call_id": ""}
    assert (said.status, events[-1].type) == (whole.status, f"response.{whole.status}")
    if 4 <= tokens <= 6:
        (call,) = said.output
        arguments = ('{"to', '{"town": "Os', '{"town": "Oslo 你"')[tokens - 4]
        assert (call.name, call.status, call.arguments, said.status) == (
            "weather", "incomplete", arguments, "incomplete",
        )  # fmt: skip


@pytest.mark.parametrize("model", ["calls", "bits"])
def test_the_client_follows_a_stream(client, model):
    with client.responses.stream(model=model, input="Oslo?", tools=[WEATHER, ADD]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    whole = client.responses.create(model=model, input="Oslo?", tools=[WEATHER, ADD])
    found = [(item.type, getattr(item, "arguments", None)) for item in final.output]
    assert found == [(item.type, getattr(item, "arguments", None)) for item in whole.output]
    assert [kind for kind, _ in found].count("function_call") == 2
    assert {arguments for kind, arguments in found if arguments} <= set(snapshots)


def test_items_become_turns():
    items = [
        {"role": "developer", "content": "Say little."},
        {"role": "user", "content": [{"type": "input_text", "text": "Os"}, {"type": "input_text", "text": "lo?"}]},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "id": "f", "call_id": "c1", "name": "add", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"town": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "cold"}]},
        {"role": "system", "content": "Go on."},
    ]
    chat = ResponsesRequest.model_validate({"input": items, "instructions": "Be kind."}).to_chat_request()
    turns = [message.model_dump(exclude_none=True, exclude={"tool_calls"}) for message in chat.messages]
    assert turns == [
        {"role": "system", "content": "Be kind.\n\nSay little."},
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "cold", "tool_call_id": "c2"},
        {"role": "system", "content": "Go on."},
    ]
    assert [(call.id, call.function.name) for call in chat.messages[2].tool_calls] == [("c1", "add"), ("c2", "weather")]


def test_settings_go_where_the_other_path_has_them():
    body = {
        "input": "a",
        "reasoning": {"effort": "low"},
        "max_output_tokens": 7,
        "top_k": 3,
        "logit_bias": {"5": 1},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "tools": [ADD],
        "tool_choice": {"type": "function", "name": "add"},
        "store": False,
    }
    with pytest.raises(ValueError, match="give one form"):
        ResponsesRequest.model_validate(body).to_chat_request()
    chat = ResponsesRequest.model_validate(body | {"tool_choice": "auto"}).to_chat_request()
    assert (chat.reasoning_effort, chat.requested_tokens(), chat.top_k, chat.logit_bias) == ("low", 7, 3, {"5": 1.0})
    assert chat.response_format.json_schema.schema_ == {"type": "object"}
    forced = ResponsesRequest.model_validate(
        {key: value for key, value in body.items() if key != "text"}
    ).to_chat_request()
    assert forced.is_call_forced() and forced.tool_choice.function.name == "add"


@NEEDS_FORMS
def test_forms(client):
    form = {"type": "json_schema", "name": "n", "schema": {"enum": [7]}, "strict": True}
    answer = client.responses.create(model="plain", input="7?", text={"format": form})
    assert json.loads(answer.output_text) == 7
    tool = {**ADD, "parameters": {"type": "object", "properties": {}, "additionalProperties": False}, "strict": True}
    forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 64}
    (call,) = client.responses.create(model="plain", input="1?", **forced).output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {})


WRONG = {
    "store": ({"store": True}, "stores no responses"),
    "background": ({"background": True}, "stores no responses"),
    "an earlier response": ({"previous_response_id": "resp_1"}, "send the earlier items again"),
    "a conversation": ({"conversation": "conv_1"}, "conversation is not supported"),
    "no input": ({"input": []}, "input"),
    "a tool that is no function": ({"tools": [{"type": "web_search"}]}, "tools.0"),
    "a picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "nothing is fetched",
    ),
    "half a call": ({"input": [{"type": "function_call", "name": "f"}]}, "needs call_id, arguments"),
    "a message without a role": ({"input": [{"content": "a"}]}, "needs role"),
    "a reference": ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    "a choice of no kind": ({"tools": [ADD], "tool_choice": {"name": "f"}}, "tool_choice.type: Field required"),
    "a tool that is not there": ({"tools": [ADD], "tool_choice": {"type": "function", "name": "g"}}, "not among"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "too many tokens": ({"max_output_tokens": 65}, "at most 64"),
    "an unknown field": ({"inputs": "a"}, "unknown field inputs"),
}


@pytest.mark.parametrize("about", WRONG)
def test_what_is_refused(server, about):
    body, words = WRONG[about]
    answer = server.post(PATH, {"model": "plain", "input": "a", **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert set(error) == {"message", "type", "param", "code"}


def test_nothing_is_stored(server):
    with server.client() as client:
        answer = client.get(f"{PATH}/resp_1")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


def test_a_stream_that_takes_too_long_fails(server):
    parts = {served.name: (served.engine, served.model) for served in server.catalogue.models}
    with serving(catalogue_of(parts, seconds=1e-6)) as running:
        address = f"{running.url}/v1"
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            *_, error, failed = client.responses.create(model="plain", input="a", stream=True)
        assert (error.type, error.code) == ("error", "timeout") and "more than" in error.message
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert "more than" in failed.response.error.message
        assert running.post(PATH, {"model": "plain", "input": "a"}).status_code == 504


@NEEDS_FORMS
def test_calls_that_were_whole_outlive_a_cut(server):
    tokenizer = server.catalogue.find_model("plain").engine.tokenizer
    tool = {"type": "function", "name": "a", "parameters": {"const": {}, "type": "object"}}
    body = {
        "model": "plain",
        "input": "How is it?",
        "tools": [tool],
        "tool_choice": "required",
        "max_output_tokens": 64,
        "logit_bias": {str(tokenizer.convert_tokens_to_ids("]")): -100},
    }
    answer = server.post("/v1/responses", body).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    kinds = [(item["type"], item["status"]) for item in answer["output"]]
    assert kinds and set(kinds) == {("function_call", "completed")}
