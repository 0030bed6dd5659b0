"""Forms of answers under a model that wants nothing but blanks."""

from __future__ import annotations

import json

import pytest

from anabatic.infer import constrained_decoding, tool_call_parser
from anabatic.infer.sampling import Sampling

pytest.importorskip("llguidance", reason="the extra constrain is not installed")

TOWN = {"type": "object", "properties": {"town": {"type": "string"}, "n": {"enum": [1]}}, "required": ["town", "n"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": TOWN | {"additionalProperties": False}}}
BARE = {"type": "function", "function": {"name": "add"}}


def written(tokenizer, schema, text_of_strings="   ", most=400):
    """An answer with a blank wherever one is allowed, in texts at most `most`, that else continues at random."""
    known = constrained_decoding.make_constraint(
        Sampling(json_schema=json.dumps(schema)), tokenizer, len(tokenizer), frozenset([2])
    )
    blanks = [token for token in range(len(tokenizer)) if tokenizer.decode([token]) in (" ", "\n", "\t", "\r")]
    (quote,) = tokenizer('"', add_special_tokens=False)["input_ids"]
    text = ""
    for _ in range(most):
        allowed = known.allowed_tokens()
        wanted = [token for token in blanks if allowed[token]]
        inside = text.count('"') % 2 == 1
        if inside and text.endswith(text_of_strings) and allowed[quote]:
            wanted = [quote]
        token = wanted[0] if wanted else int(allowed.int().argmax())
        if known.accept_token(token):
            return text if token == 2 else text + tokenizer.decode([token])
        text += tokenizer.decode([token])
    return text


@pytest.mark.parametrize(
    "schema",
    [
        tool_call_parser.build_call_schema([WEATHER], None, False),
        tool_call_parser.build_call_schema([WEATHER], "weather"),
        tool_call_parser.build_call_schema([BARE], "add"),
        WEATHER["function"]["parameters"],
        WEATHER["function"]["parameters"] | {"x-guidance": {"whitespace_pattern": " *"}},
    ],
)
def test_between_the_parts_of_json_stands_one_blank_at_most(tokenizer, schema):
    text = written(tokenizer, schema)
    assert json.loads(text) is not None
    assert "  " not in text.replace('"   "', "") and "\n\n" not in text


def test_blanks_within_a_text_end(tokenizer):
    text = written(tokenizer, TOWN, text_of_strings="never", most=120)
    inside = text.split('"')[-1]
    assert inside.startswith(" " * 32)
    assert "  " not in inside.lstrip()


def test_a_tool_without_parameters_is_called_with_none(tokenizer):
    assert json.loads(written(tokenizer, tool_call_parser.build_call_schema([BARE], "add"))) == {}
