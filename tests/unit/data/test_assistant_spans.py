"""Templates that mark nothing: the same turns are learned as with marks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabatic.data.tokenizer import hf_folder
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from suite.rendered_rows import tokenize_conversations

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "}"}}}
TRIMMED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
)
"""The older Llama and Mistral shape: no system role, text trimmed, a blank in front of what is said."""
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the reasoning of all turns but the last, as Qwen3's does."""


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hf_folder.load_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("marked")))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tok = hf_folder.load_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("bare")))
    tok.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", tok.chat_template)
    assert "generation %}" not in tok.chat_template
    return tok


@pytest.fixture
def other(bare: Any) -> Iterator[Any]:
    inner = bare.chat_template
    yield bare
    bare.chat_template = inner


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\ue0f1\ue0f2\ue0f3<"), min_size=1, max_size=12)
ASSISTANT = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": text}, WORDS),
    st.builds(lambda text: {"role": "assistant", "content": text, "tool_calls": [CALL]}, WORDS),
    st.builds(lambda text, why: {"role": "assistant", "content": text, "reasoning_content": why}, WORDS, WORDS),
)
TURNS = st.lists(
    st.tuples(WORDS.map(lambda text: {"role": "user", "content": text}), ASSISTANT), min_size=1, max_size=3
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(TURNS, st.booleans())
def test_the_difference_finds_what_marks_say(
    marked: Any, bare: Any, pairs: list[tuple[dict[str, Any], dict[str, Any]]], system: bool
) -> None:
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    messages += [turn for pair in pairs for turn in pair]
    (ids, mask), (same, found) = (
        tokenize_conversations([messages], marked)[0],
        tokenize_conversations([messages], bare)[0],
    )
    assert ids.tolist() == same.tolist()
    assert mask.tolist() == found.tolist()


def said(messages: list[dict[str, Any]], tok: Any) -> str:
    ids, mask = tokenize_conversations([messages], tok)[0]
    return str(tok.decode(ids[mask == 1]))


def test_a_template_that_trims(other: Any) -> None:
    other.chat_template = TRIMMED
    turns = [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": "  one\n"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two"},
    ]
    assert said(turns, other) == " one<|im_end|> two<|im_end|>"


def test_a_template_that_drops_earlier_reasoning(other: Any) -> None:
    other.chat_template = FORGETFUL
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one", "reasoning_content": "because"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<three", "reasoning_content": "therefore"},
    ]
    assert said(turns, other) == "one<|im_end|><think>therefore</think><three<|im_end|>"
