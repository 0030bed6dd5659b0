"""Tool calls in a model's text: found wherever it is cut, sent bit by bit, and no character lost."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.infer import tool_call_parser
from anabatic.infer.tool_call_parser import CALL_CLOSE, CALL_OPEN, HermesParser, make_forced_parser, make_parser

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
        '{"name": "add", "parameters": {"x": "',
        CALL_OPEN + '{"name": "add", "arguments": {"x": ',
        CALL_OPEN + '{"arguments": {"x": [',
        "\n" + CALL_CLOSE,
        '"name"',
        '"parameters"',
        ":",
        ",",
        "[",
        "]",
        "1e5",
        "\\u00e9",
        "</",
    ]
)
TEXTS = st.lists(BITS, max_size=14).map("".join)
MAKERS = {
    "hermes": lambda several=True: make_parser("hermes", NAMES, several),
    "llama3": lambda several=True: make_parser("llama3", NAMES, several),
    "list": lambda several=True: make_forced_parser(NAMES, None),
    "arguments": lambda several=True: make_forced_parser(NAMES, "add"),
}


class Call(NamedTuple):
    """A call, joined from its parts."""

    name: str
    arguments: str
    ended: bool = True


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
    found = []
    for event in events:
        if event.name is not None:
            found.append([event.name, "", False])
        if event.arguments:
            assert not found[-1][2]  # nothing is added to arguments that were complete
            found[-1][1] += event.arguments
        if event.ends_call:
            assert not found[-1][2]
            found[-1][2] = True
    return [Call(*one) for one in found]


def layout(events):
    """Return text and calls in their order."""
    parts = []
    for event in events:
        if event.text and parts and isinstance(parts[-1], str):
            parts[-1] += event.text
        elif event.text:
            parts.append(event.text)
        if event.name is not None:
            parts.append((event.name,))
    return parts


@settings(max_examples=300)
@given(TEXTS, st.lists(st.integers(0, 10**6), max_size=8), st.sampled_from(sorted(MAKERS)), st.booleans())
def test_any_text_cut_anywhere_loses_nothing(text, places, kind, several):
    whole = read(MAKERS[kind](several), [text])
    pieces = read(MAKERS[kind](several), cut(text, places))
    letters = read(MAKERS[kind](several), list(text))
    for events in (whole, pieces, letters):
        assert "".join(event.raw for event in events) == text
        assert all(
            event.text in ("", event.raw) and (event.arguments in event.raw or event.arguments == "{}")
            for event in events
        )
    assert calls(whole) == calls(pieces) == calls(letters)
    assert said(whole) == said(pieces) == said(letters)
    assert layout(whole) == layout(pieces) == layout(letters)
    assert several or len(calls(whole)) <= 1 or kind == "list"


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from(["", "Well.", "{x}", "<tool_call>"]),
    st.integers(0, 3),
)
def test_calls_between_tags_are_found(made, before, indent):
    def write(arguments):
        return json.dumps(arguments, ensure_ascii=False, indent=indent or None)

    text = before + "".join(
        f'\n{CALL_OPEN}\n{{"name": "{name}", "arguments": {write(arguments)}}}\n{CALL_CLOSE}'
        for name, arguments in made
    )
    for pieces in ([text], list(text)):
        events = read(HermesParser(NAMES), pieces)
        assert said(events) == before
        assert calls(events) == [Call(name, write(arguments)) for name, arguments in made]  # byte by byte as written


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from([("", "; ", "", "llama3"), (" ", ";", " ; ", "llama3"), ("[", ", ", "]", "list")]),
)
def test_bare_calls_are_found(made, signs):
    opening, between, closing, kind = signs
    text = opening + between.join(call_text(*one, "parameters") for one in made) + closing
    events = read(MAKERS[kind](), list(text))
    assert said(events) == ""
    assert calls(events) == [Call(name, json.dumps(one, ensure_ascii=False)) for name, one in made]


def test_a_call_is_sent_bit_by_bit():
    reader = HermesParser(NAMES)
    assert said(reader.push_text("Yes.\n<tool_call>\n{")) == "Yes."
    assert reader.push_text('"name": "weather') == []
    (begun,) = reader.push_text('"')
    assert (begun.name, begun.arguments, begun.raw) == ("weather", "", '\n<tool_call>\n{"name": "weather"')
    sent = [(one.arguments, one.ends_call) for piece in (', "arg', 'uments": {"to', 'wn": "Os', 'lo"', "}", "}\n</tool")
            for one in reader.push_text(piece)]  # fmt: skip
    assert sent == [("", False), ('{"to', False), ('wn": "Os', False), ('lo"', False), ("}", True), ("", False)]
    assert said(reader.push_text("_call> Done")) == " Done"


SHAPES = {
    "arguments before the name": ('{"arguments": {"x": 1}, "name": "add"}', '{"x": 1}'),
    "other keys": ('{"id": [1, {"name": "x"}], "name": "add", "arguments": {"x": 1}, "type": null}', '{"x": 1}'),
    "a key twice": ('{"name": "add", "name": "weather", "arguments": {"x": 1}, "arguments": {}}', '{"x": 1}'),
    "escapes in keys": ('{"n\\u0061me": "\\u0061dd", "arguments": {"x": 1}}', '{"x": 1}'),
    "the other key": ('{"name": "add", "parameters": {"x": 1}}', '{"x": 1}'),
    "no arguments": ('{"name": "add"}', "{}"),
    "no object": ('{"name": "add", "arguments": "{}"}', '"{}"'),
    "a number": ('{"name": "add", "arguments": 12 }', "12"),
    "not a number": ('{"name": "add", "arguments": {"x": NaN}}', '{"x": NaN}'),
    "too large": ('{"name": "add", "arguments": {"x": 1e999}}', '{"x": 1e999}'),
    "blanks": ('{"name" : "add" ,\n"arguments"\t: { "x" : 1 } }', '{ "x" : 1 }'),
    "tags in a string": ('{"name": "add", "arguments": {"x": "</tool_call>"}}', '{"x": "</tool_call>"}'),
    "less than": ('{"name": "add", "arguments": {x < 1 </tool}}', "{x < 1 </tool}"),
    "a bracket is missing": ('{"name": "add", "arguments": {"x": 1}', '{"x": 1}'),
    "two brackets are missing": ('{"name": "add", "arguments": {"x": [1', '{"x": [1'),
    "a quote is missing": ('{"name": "add", "arguments": {"x": "1\n', '{"x": "1\n'),
    "half a character": ('{"name": "add", "arguments": {"x": "\\ud800"}}', '{"x": "\\ud800"}'),
    "deep": ('{"name": "add", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001, '{"a":' * 5000 + "1" + "}" * 5000),
}


@pytest.mark.process
@pytest.mark.parametrize("about", SHAPES)
def test_arguments_are_what_the_model_wrote(about):
    inner, arguments = SHAPES[about]
    text = f"a {CALL_OPEN}{inner}{CALL_CLOSE} b"
    for pieces in ([text], list(text)):
        events = read(HermesParser(NAMES), pieces)
        assert (said(events), calls(events)) == ("a b", [Call("add", arguments)])
    if about not in ("a bracket is missing", "two brackets are missing", "a quote is missing", "less than"):
        bare = inner.replace("arguments", "parameters")
        assert calls(read(MAKERS["llama3"](), list(bare))) == [Call("add", arguments)]


def test_what_follows_a_call_and_is_no_tag_is_text():
    call = call_text("add", {})
    for after in (call, " oops", "}", "</tool>", "[]"):
        events = read(HermesParser(NAMES), list(f"{CALL_OPEN}{call}{after}{CALL_CLOSE}"))
        assert (said(events).strip(), calls(events)) == (f"{after}{CALL_CLOSE}".strip(), [Call("add", "{}")])
    events = read(MAKERS["llama3"](), list(call.replace("arguments", "parameters") * 2))
    assert (len(calls(events)), said(events)) == (1, call.replace("arguments", "parameters"))


def test_a_call_that_the_end_of_the_answer_cuts():
    text = CALL_OPEN + call_text("add", {"x": "é"}) + CALL_CLOSE
    start, end = text.index('{"x"'), text.index("}") + 1
    for length in range(len(text) + 1):
        events = read(HermesParser(NAMES), list(text[:length]))
        if length <= text.index(", "):
            known = length >= text.index(", ")
            assert calls(events) == ([Call("add", "", False)] if known else [])
            assert said(events) == ("" if known else text[:length])
        else:
            assert calls(events) == [Call("add", text[start : min(length, end)], length >= end)]
            assert said(events) == ""


MALFORMED = {
    "no such tool": call_text("ghost", {}),
    "no name": '{"arguments": {"x": 1}}',
    "a name that is none": '{"name": ["add"], "arguments": {}}',
    "a torn name": '{"name": "ad',
    "a line break in the name": '{"name": "add\n", "arguments": {}}',
    "an escape that is none": '{"name": "add\\x", "arguments": {}}',
    "no JSON": "{name: add, arguments: {}}",
    "a list": "[]",
    "words": "add(1, 2)",
    "a comma too many": '{"id": 1,}',
    "torn before the name": '{"arguments": {"x": [1',
}


@pytest.mark.parametrize("about", MALFORMED)
def test_malformed_calls_stay_text(about):
    inner = MALFORMED[about]
    text = f"a {CALL_OPEN}{inner}{CALL_CLOSE} b"
    for pieces in ([text], list(text)):
        events = read(HermesParser(NAMES), pieces)
        assert (said(events), calls(events)) == (text, [])
    after = f"{text}{CALL_OPEN}{call_text('add', {'x': 1})}{CALL_CLOSE}"
    found = calls(read(HermesParser(NAMES), [after]))
    assert found == ([] if about == "a torn name" else [Call("add", '{"x": 1}')])
    bare = inner.replace("arguments", "parameters")
    assert said(read(MAKERS["llama3"](), list(bare))) == bare


@pytest.mark.process
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_cost_is_linear(kind):
    """A megabyte in pieces of eight characters: far more seconds where anything is read twice."""
    long = json.dumps({"x": "ab{ " * 250_000})
    call = f'{{"name": "add", "arguments": {long}}}'
    early = f'{{"arguments": {long}, "name": "add"}}'
    forms = {
        "hermes": [f"{CALL_OPEN}{call}{CALL_CLOSE}", CALL_OPEN + early, f'{CALL_OPEN}{{":"' * 30_000],
        "llama3": [call, early, "; ".join(['{"name": "add"}'] * 20_000)],
        "list": [f"[{call}]", f"[{early}"],
        "arguments": [long],
    }
    for text in [*forms[kind], " " * 10**6]:
        begun = time.process_time()
        events = read(MAKERS[kind](), [text[at : at + 8] for at in range(0, len(text), 8)])
        assert time.process_time() - begun < 4
        assert "".join(event.raw for event in events) == text
    (found,) = calls(read(MAKERS[kind](), [forms[kind][0]]))
    assert found.arguments == long


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
    assert calls(events) == [Call("add", '{"x": 1}')] and said(events) == two


def test_an_answer_of_prescribed_form():
    assert calls(read(make_forced_parser(NAMES, "add"), [' {"x"', ": 1} "])) == [Call("add", '{"x": 1}')]
    assert calls(read(make_forced_parser(NAMES, "add"), ['{"x"', ": "])) == [Call("add", '{"x": ', False)]
    both = json.dumps([{"name": "add", "parameters": {}}, {"name": "weather", "parameters": {"a": "é"}}])
    events = read(make_forced_parser(NAMES, None), list(both))
    assert calls(events) == [Call("add", "{}"), Call("weather", '{"a": "\\u00e9"}')]
    assert "".join(event.raw for event in events) == both
    for torn in ('{"x": ', "[]", '[{"name": "ghost", "parameters": {}}]', "[1]", ""):
        assert said(read(make_forced_parser(NAMES, None), [torn])) == torn
    assert said(read(make_forced_parser(NAMES, "add"), list(" [1]"))) == " [1]"


def test_a_list_of_calls_that_is_cut():
    one, two = ({"name": name, "parameters": {"a": "}{"}} for name in NAMES)
    whole = json.dumps([one, two])
    bounds = [(whole.index(f'"{name}"') + len(name) + 2, whole.index('{"a"', whole.index(name))) for name in NAMES]
    size = len('{"a": "}{"}')
    for length in range(len(whole) + 1):
        events = read(make_forced_parser(NAMES, None), list(whole[:length]))
        known = [
            Call(name, whole[start : min(start + size, length)], length >= start + size)
            for name, (begun, start) in zip(NAMES, bounds, strict=True)
            if length >= begun
        ]
        assert calls(events) == known
        assert said(events) == ("" if known else whole[:length])  # the beginning of a second one is dropped
        assert "".join(event.raw for event in events) == whole[:length]
    strange = json.dumps([one, {"name": "ghost", "parameters": {}}])
    assert said(read(make_forced_parser(NAMES, None), [strange])) == strange[len(json.dumps([one])) - 1 :]


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
