"""Calls in a model's text: found wherever it is cut, and no character lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.infer import tool_call_parser
from anabatic.infer.tool_call_parser import (
    CALL_CLOSE,
    CALL_OPEN,
    ForcedCallParser,
    HermesParser,
    Llama3Parser,
    ParsedCall,
)

NAMES = ("weather", "add")
ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.text(max_size=8) | st.integers() | st.lists(st.booleans(), max_size=2), max_size=3
)
BITS = st.sampled_from(
    [
        CALL_OPEN,
        CALL_CLOSE,
        "\n",
        " ",
        "{",
        "}",
        '"',
        "\\",
        ";",
        "a",
        "é",
        "你",
        "<tool",
        '"name": "add"',
        '"arguments": {}',
        '{"name": "add", "arguments": {"x": "</tool_call>"}}',
        '{"name": "add", "parameters": {}}',
    ]
)
TEXTS = st.lists(BITS, max_size=14).map("".join)


def call_text(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def read(reader, pieces):
    events = [event for piece in pieces for event in reader.push_text(piece)]
    return [*events, *reader.flush()]


def cut(text, places):
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in zip(borders, borders[1:], strict=False)]


def said(events):
    return "".join(event.text for event in events)


def calls(events):
    return [event.call for event in events if event.call is not None]


@settings(max_examples=60)
@given(TEXTS, st.lists(st.integers(0, 10**6), max_size=8), st.sampled_from([HermesParser, Llama3Parser]), st.booleans())
def test_any_text_cut_anywhere_loses_nothing(text, places, kind, several):
    whole = read(kind(NAMES, several), [text])
    pieces = read(kind(NAMES, several), cut(text, places))
    letters = read(kind(NAMES, several), list(text))
    for events in (whole, pieces, letters):
        assert "".join(event.raw for event in events) == text
        assert all(event.text in ("", event.raw) for event in events)
    assert calls(whole) == calls(pieces) == calls(letters)
    assert said(whole) == said(pieces) == said(letters)
    assert several or len(calls(whole)) <= 1


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from(["", "Well.", "{x}"]),
)
def test_calls_between_tags_are_found(made, before):
    text = before + "".join(f"\n{CALL_OPEN}\n{call_text(*one)}\n{CALL_CLOSE}" for one in made)
    events = read(HermesParser(NAMES), list(text))
    assert said(events) == before
    assert [(call.name, json.loads(call.arguments)) for call in calls(events)] == made


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3))
def test_bare_calls_are_found(made):
    text = "; ".join(call_text(*one, "parameters") for one in made)
    events = read(Llama3Parser(NAMES), list(text))
    assert said(events) == ""
    assert [(call.name, json.loads(call.arguments)) for call in calls(events)] == made


MALFORMED = {
    "no such tool": call_text("ghost", {}),
    "no arguments": '{"name": "add"}',
    "arguments that are no object": '{"name": "add", "arguments": "x"}',
    "a name that is none": '{"name": ["add"], "arguments": {}}',
    "torn": '{"name": "add", "arguments": {',
    "no JSON": "{name: add, arguments: {}}",
    "not a number": '{"name": "add", "arguments": {"x": NaN}}',
    "too large": '{"name": "add", "arguments": {"x": 1e999}}',
    "a list": "[]",
    "words": "add(1, 2)",
    "two objects": call_text("add", {}) * 2,
    "endless": '{"name": "add", "arguments": ' + '{"a":' * 5000,
}


@pytest.mark.parametrize("about", MALFORMED)
def test_malformed_calls_stay_text(about):
    inner = MALFORMED[about]
    text = f"a {CALL_OPEN}{inner}{CALL_CLOSE} b"
    assert read(HermesParser(NAMES), [text]) and said(read(HermesParser(NAMES), [text])) == text
    after = f"{text}{CALL_OPEN}{call_text('add', {'x': 1})}{CALL_CLOSE}"
    found = calls(read(HermesParser(NAMES), [after]))
    assert found == ([] if about in ("torn", "endless") else [ParsedCall("add", '{"x": 1}')]) or about in (
        "torn",
        "endless",
    )
    bare = inner.replace("arguments", "parameters")
    events = read(Llama3Parser(NAMES), list(bare))
    assert said(events) == (bare if about != "two objects" else bare[len(bare) // 2 :])


def test_text_comes_as_soon_as_it_is_certain():
    reader = HermesParser(NAMES)
    assert said(reader.push_text("Hello <tool")) == "Hello"
    assert said(reader.push_text("box> there")) == " <toolbox> there"
    assert reader.push_text(f"\n{CALL_OPEN}") == []
    assert said(reader.push_text("no")) == f"\n{CALL_OPEN}no"
    assert said(reader.push_text("!")) == "!"


def test_one_call_alone_where_several_are_not_allowed():
    one, two = (f"{CALL_OPEN}{call_text('add', {'x': n})}{CALL_CLOSE}" for n in (1, 2))
    events = read(HermesParser(NAMES, False), [one + two])
    assert calls(events) == [ParsedCall("add", '{"x": 1}')] and said(events) == two


def test_an_answer_of_prescribed_form():
    assert calls(read(ForcedCallParser(NAMES, "add"), ['{"x"', ": 1}"])) == [ParsedCall("add", '{"x": 1}')]
    both = json.dumps([{"name": "add", "parameters": {}}, {"name": "weather", "parameters": {"a": "é"}}])
    events = read(ForcedCallParser(NAMES, None), list(both))
    assert calls(events) == [ParsedCall("add", "{}"), ParsedCall("weather", '{"a": "é"}')]
    assert "".join(event.raw for event in events) == both
    for torn in ('{"x": ', "[]", '[{"name": "ghost", "parameters": {}}]', "[1]", ""):
        assert said(read(ForcedCallParser(NAMES, None), [torn])) == torn


def test_calls_that_were_whole_before_an_answer_was_cut():
    one, two = ({"name": name, "parameters": {"a": "}{"}} for name in NAMES)
    whole = json.dumps([one, two], indent=1)
    known = [ParsedCall(name, '{"a": "}{"}') for name in NAMES]
    ends = [at + 3 for at in range(len(whole)) if whole.startswith("\n }", at)]
    for length in range(len(whole) + 1):
        events = read(ForcedCallParser(NAMES, None), list(whole[:length]))
        assert calls(events) == known[: sum(end <= length for end in ends)]
        assert said(events) == ("" if calls(events) else whole[:length])
        assert "".join(event.raw for event in events) == whole[:length]
    assert calls(read(ForcedCallParser(NAMES, None), [whole])) == known
    strange = json.dumps([one, {"name": "ghost", "parameters": {}}])
    assert said(read(ForcedCallParser(NAMES, None), [strange])) == strange[len(json.dumps([one])) - 1 :]
    reader = ForcedCallParser(NAMES, None)
    assert calls(reader.push_text(json.dumps([one, two])[:-3])) == known[:1]  # told as soon as it ends


def test_half_characters_in_arguments_stay_escaped():
    text = CALL_OPEN + '{"name": "add", "arguments": {"x": "\\ud800", "y": "你"}}' + CALL_CLOSE
    (call,) = calls(read(HermesParser(NAMES), [text]))
    call.arguments.encode()
    assert json.loads(call.arguments) == {"x": "\ud800", "y": "你"}


LLAMA = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
XML = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ c.function.name }}>\n</function>\n</tool_call>{% endfor %}{% endfor %}"
)


def test_the_template_is_asked_how_calls_are_written(tokenizer, monkeypatch):
    assert tool_call_parser.detect_style(tokenizer) == "hermes"
    assert tool_call_parser.shows_tools(tokenizer)
    plain = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    refuses = "{{ raise_exception('no') }}"
    for template, kind in ((LLAMA, "llama3"), (XML, None), (plain, None), (refuses, None), (None, None)):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        assert tool_call_parser.detect_style(tokenizer) == kind
        assert not tool_call_parser.shows_tools(tokenizer)


def test_schema_of_answers_that_must_call():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["x"]}}}]
    assert tool_call_parser.build_call_schema(tools, "add") == {"type": "object", "required": ["x"]}
    every = tool_call_parser.build_call_schema(tools, None, several=False)
    assert every["maxItems"] == 1 and every["items"]["anyOf"][0]["properties"]["name"] == {"const": "add"}
