"""Conversations from the standard library."""

from __future__ import annotations

import itertools

import pytest

from anabatic.data.builtin import stdlib
from anabatic.data.readers.document import is_held_out


@pytest.fixture(scope="module")
def conversations():
    return list(stdlib.generate_conversations(None))


def test_many_conversations_take_turns_and_say_something(conversations):
    assert len(conversations) > 2000
    for messages in conversations:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(message["content"].strip() for message in messages)
    assert any(len(messages) > 2 for messages in conversations)


@pytest.mark.process
def test_the_order_is_fixed_and_rows_is_a_prefix(conversations):
    assert list(stdlib.generate_conversations(25)) == conversations[:25]


def test_held_out_modules_are_never_quoted(conversations):
    hidden = [
        path.stem
        for path in stdlib.list_stdlib_files()
        if path.parent == stdlib.find_stdlib_folder()
        and is_held_out(f"stdlib:{path.name}", stdlib.MAX_HOLDOUT_FRACTION)
    ]
    assert hidden
    asked = {message["content"] for messages in conversations for message in messages[::2]}
    for name in hidden:
        assert f"What is the module {name} for?" not in asked
        assert not [question for question in asked if f" {name}." in question and question.endswith(" do?")]


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (None, ""),
        ("", ""),
        (
            "Return the answer to everything that was asked so far. More text follows.",
            "Return the answer to everything that was asked so far.",
        ),
        ("Short one. Second sentence\nover two lines. Third.", "Short one. Second sentence over two lines."),
        (
            "copy(src, dst) -> dst\n\nCopy a file to another place in the tree of files",
            "Copy a file to another place in the tree of files.",
        ),
        (">>> 1 + 1\n2", ""),
        ("word", ""),
        ("x" * 10 + " y" * 200, ""),
    ],
)
def test_summary(docstring, expected):
    assert stdlib.summarize_docstring(docstring) == expected


def test_a_known_function_is_answered_with_its_signature(conversations):
    turns = itertools.chain.from_iterable(zip(m[::2], m[1::2], strict=True) for m in conversations)
    signatures = [answer["content"] for question, answer in turns if question["content"].startswith("How do I call ")]
    assert len(signatures) > 100
    assert all(text.endswith(")") and "(" in text for text in signatures)
    assert not [
        text for text in signatures if "(self" in text and text.split("(")[0].count(".") == 1 and text[0].isupper()
    ]
