"""Reasoning and tool calls in one answer: a stream of any pieces says what the whole answer says, in both APIs."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.chat import Sampling
from anabatic.infer.reasoning_parser import ReasoningParser
from anabatic.infer.request import Completion, Request
from anabatic.infer.server.engine_worker import TextDelta
from anabatic.infer.server.response_builder import CompletionBuilder
from anabatic.infer.server.responses_events import ResponsesBuilder
from anabatic.infer.server.responses_schema import ResponsesRequest
from anabatic.infer.tool_call_parser import CALL_CLOSE, CALL_OPEN, make_parser
from anabatic_testing.random_models import build_byte_tokenizer

NAMES = ("weather", "add")
FORMS = {"hermes": (CALL_OPEN, CALL_CLOSE, "arguments"), "llama3": ("", "; ", "parameters")}
REASONING = ["", "<think>", "<think>Oslo 你?\n</think>\n\n", f"<think>{CALL_OPEN}</think>", "\n<think></think>"]
TEXTS = st.sampled_from(["", "", " ", "Well 你. ", "\n\n", "<think>no</think>", "<tool", CALL_OPEN, "{", CALL_CLOSE])
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.text(max_size=6) | st.integers(), max_size=2)


@st.composite
def answers(draw):
    """Return a format, the text of an answer in it, and the pieces in which it comes."""
    kind = draw(st.sampled_from(sorted(FORMS)))
    opening, closing, key = FORMS[kind]
    text = draw(st.sampled_from(REASONING)) + draw(TEXTS)
    for arguments in draw(st.lists(ARGUMENTS, max_size=3)):
        call = {"name": draw(st.sampled_from([*NAMES, "ghost"])), key: arguments}
        text += opening + json.dumps(call, ensure_ascii=draw(st.booleans())) + closing + draw(TEXTS)
    text = text[: draw(st.integers(0, len(text)) | st.just(len(text)))]  # where max_tokens or a stop string ends it
    if draw(st.booleans()):
        return kind, text, [*text, ""]
    ends = sorted({*draw(st.lists(st.integers(0, len(text)), max_size=12)), len(text)})
    return kind, text, [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.fixture(scope="module")
def request_of_one(tmp_path_factory):
    tokenizer = build_byte_tokenizer(tmp_path_factory.mktemp("words"))
    return Request([1], Sampling(), frozenset(), 8, Random(0), tokenizer)


def format_pieces(formatter, pieces, finish_reason):
    """Return the bodies of the events of an answer."""
    sent = formatter.start_stream()
    for at, piece in enumerate(pieces):
        end = finish_reason if at == len(pieces) - 1 else ""
        sent += formatter.format_delta(TextDelta(0, piece, at + 1, end))
    lines = b"".join(sent + formatter.finish_stream()).splitlines()  # of text, other characters end lines, too
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def join_chunks(chunks):
    """Return the message that the chunks of a stream are, without the ids of its calls."""
    message = {"content": "", "reasoning_content": "", "calls": []}
    for choice in (chunk["choices"][0] for chunk in chunks):
        message["finish_reason"], delta = choice["finish_reason"], choice["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for entry in delta.get("tool_calls", []):
            function = entry["function"]
            if "id" in entry:
                assert (entry["index"], entry["type"]) == (len(message["calls"]), "function")
                assert function == {"name": function["name"], "arguments": ""}
                message["calls"].append([function["name"], ""])
            else:
                assert entry.keys() == {"index", "function"} and function.keys() == {"arguments"}
                assert entry["index"] == len(message["calls"]) - 1 and function["arguments"]
                message["calls"][-1][1] += function["arguments"]
    return message


@settings(max_examples=200, deadline=None)
@given(answers(), st.sampled_from(["stop", "length"]), st.booleans())
def test_chat_completions(request_of_one, answer, finish_reason, begins_inside):
    kind, text, pieces = answer
    shape = CompletionBuilder(
        True,
        "m",
        make_parser=lambda: make_parser(kind, NAMES),
        make_reasoning_parser=lambda _: ReasoningParser(begins_inside),
    )
    (whole,) = shape.build_response([Completion([], text, finish_reason, [])], [request_of_one], 1)["choices"]
    streamed = join_chunks(format_pieces(shape.make_formatter([request_of_one], 1, False), pieces, finish_reason))
    message = whole["message"]
    assert streamed == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [list(call["function"].values()) for call in message.get("tool_calls", [])],
        "finish_reason": whole["finish_reason"],
    }


def check_item_events(events, item):
    """The events of one output item come in OpenAI's order, and their pieces are the item."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    pieces = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    count = sum(kind.endswith(".delta") for kind in kinds)
    if item["type"] == "function_call":
        what = "function_call_arguments"
        assert kinds == ["output_item.added", *[f"{what}.delta"] * count, f"{what}.done", "output_item.done"]
        assert events[-2]["arguments"] == item["arguments"] == pieces
        assert events[0]["item"] == item | {"arguments": "", "status": "in_progress"}
    else:
        what = "output_text" if item["type"] == "message" else "reasoning_text"
        parts = ["content_part.added", *[f"{what}.delta"] * count, f"{what}.done", "content_part.done"]
        assert kinds == ["output_item.added", *parts, "output_item.done"]
        assert events[-3]["text"] == item["content"][0]["text"] == pieces
    assert events[-1]["item"] == item
    assert {event.get("item_id", item["id"]) for event in events} == {item["id"]}


def without_ids(items):
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


@settings(max_examples=200, deadline=None)
@given(answers(), st.sampled_from(["stop", "length"]), st.booleans())
def test_responses(request_of_one, answer, finish_reason, begins_inside):
    kind, text, pieces = answer
    shape = ResponsesBuilder(
        ResponsesRequest(model="m", input="a"),
        "m",
        lambda: make_parser(kind, NAMES),
        lambda _: ReasoningParser(begins_inside),
    )
    request = replace(request_of_one, ids=[1] * len(pieces))
    whole = shape.build_response([Completion([], text, finish_reason, [])], [request], 1)
    events = format_pieces(shape.make_formatter([request], 1, False), pieces, finish_reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    said = events[-1]["response"]
    assert (said["status"], without_ids(said["output"])) == (whole["status"], without_ids(whole["output"]))
    assert said["usage"] == whole["usage"]
    inner, at = events[2:-1], 0
    assert [event["output_index"] for event in inner] == sorted(event["output_index"] for event in inner)
    for at, item in enumerate(said["output"]):
        check_item_events([event for event in inner if event["output_index"] == at], item)
    assert len(said["output"]) == 1 + max(event["output_index"] for event in inner)
