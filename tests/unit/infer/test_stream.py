"""Streamed text: never half a character, together the decoded answer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.infer.text_stream import REPLACEMENT_CHARACTER, TextStream, decode_tokens


def stream(tokenizer, tokens):
    text = TextStream(tokenizer)
    return [*(text.push_token(token) for token in tokens), text.flush()]


def tokens_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    text = "naïve 你好, 🙂👩‍🚀 \N{REPLACEMENT CHARACTER}?"
    tokens = tokens_of(tokenizer, text)
    assert len(tokens) > len(text)
    pieces = stream(tokenizer, tokens)
    assert "".join(pieces) == text
    assert all(REPLACEMENT_CHARACTER not in piece for piece in pieces[: tokens.index(tokens_of(tokenizer, "👩")[0])])


def test_special_tokens_are_not_text(tokenizer):
    tokens = tokens_of(tokenizer, "a<|im_end|>b<think>c</think>")
    assert len(tokens) == 6
    assert "".join(stream(tokenizer, tokens)) == "ab<think>c</think>"


def test_broken_bytes_do_not_hold_back_what_follows(tokenizer):
    byte = tokens_of(tokenizer, "é")[0]
    pieces = stream(tokenizer, [byte] * 10 + tokens_of(tokenizer, "abc"))
    assert "".join(pieces[:-1]) == REPLACEMENT_CHARACTER * 10 + "abc"
    assert "".join(stream(tokenizer, [byte])) == REPLACEMENT_CHARACTER


@given(st.text(max_size=120))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back(tokenizer, text):
    pieces = stream(tokenizer, tokens_of(tokenizer, text))
    assert "".join(pieces) == decode_tokens(tokenizer, tokens_of(tokenizer, text))
    for piece in pieces:
        piece.encode("utf-8")


@given(st.lists(st.integers(0, 260), max_size=150))
@settings(max_examples=150, deadline=None)
def test_any_tokens_come_back(tokenizer, tokens):
    assert "".join(stream(tokenizer, tokens)) == decode_tokens(tokenizer, tokens)
