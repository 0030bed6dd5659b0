"""Reasoning before an answer: split at whatever place the text is cut, and as one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.infer.reasoning_parser import ReasoningParser, begins_in_reasoning, writes_reasoning
from anabatic_testing.random_models import build_byte_tokenizer

CASES = [
    ("<think>\nfirst\nsecond\n</think>\n\nThe answer.", False, "first\nsecond", "The answer."),
    ("<think>\n\n</think>\n\nThe answer.", False, "", "The answer."),
    ("so it is\n</think>\nThe answer.", True, "so it is", "The answer."),
    ("The answer <think>no</think>.", False, "", "The answer <think>no</think>."),
    ("  \n The answer.", False, "", "  \n The answer."),
    ("<think>cut off, </thi", False, "cut off, </thi", ""),
    ("cut off", True, "cut off", ""),
    ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
    ("<think>a < b </ c </think > </think> d", False, "a < b </ c </think >", "d"),
    ("<thin", False, "", "<thin"),
    ("", False, "", ""),
    ("", True, "", ""),
    ("<think>", False, "", ""),
    ("</think>text", True, "", "text"),
]


def split(pieces: list[str], inside: bool) -> tuple[str, str]:
    parser, found = ReasoningParser(inside), []
    for at, piece in enumerate(pieces):
        found.append(parser.push_text(piece, at == len(pieces) - 1))
    return "".join(one.reasoning for one in found), "".join(one.content for one in found)


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), CASES)
def test_reasoning_is_split_however_it_is_cut(text: str, inside: bool, reasoning: str, content: str) -> None:
    expected = (reasoning, content)
    assert split([text], inside) == expected
    assert split([*text, ""], inside) == expected
    for at in range(len(text) + 1):
        assert split([text[:at], text[at:]], inside) == expected


PIECES = st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<", "</", "think>", "ä"])


@given(st.lists(PIECES, max_size=12), st.booleans())
def test_pieces_make_no_difference(pieces: list[str], inside: bool) -> None:
    text = "".join(pieces)
    assert split([*pieces, ""], inside) == split([text], inside) == split([*text, ""], inside)


def test_nothing_is_held_back_longer_than_needed() -> None:
    parser = ReasoningParser()
    assert parser.push_text("<think>one") == ("one", "")
    assert parser.push_text(" two </th") == (" two", "")
    assert parser.push_text("ree") == (" </three", "")
    assert parser.push_text("</think>\n\nyes") == ("", "yes")
    assert parser.push_text("<think>") == ("", "<think>")


def test_models_that_were_taught_to(tmp_path) -> None:
    tokenizer = build_byte_tokenizer(tmp_path)
    assert writes_reasoning(tokenizer)  # our own template writes `reasoning_content`
    assert not writes_reasoning(SimpleNamespace(chat_template="{{ messages }}", added_tokens_decoder={}))
    taught = SimpleNamespace(chat_template="{{ '<think>' }}{{ '</think>' }}", added_tokens_decoder={})
    assert writes_reasoning(taught)
    hidden = SimpleNamespace(content="<think>", special=True)
    taught.added_tokens_decoder = {1: hidden}
    assert not writes_reasoning(taught)
    assert not writes_reasoning(SimpleNamespace(chat_template=None, added_tokens_decoder={}))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a <think>\n", "<think> a", "")]
    assert [begins_in_reasoning(tokenizer, one) for one in ids] == [True, False, False]
