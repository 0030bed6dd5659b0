"""Every field of a conversation row has one type: a row with another one is refused, and never trained as it prints."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest

from anabatic.data.readers.document import ColumnMapping, Document, RowIssue
from anabatic.data.readers.row_parsing import row_to_document

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
SPELT = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
GOOD: dict[str, dict[str, Any]] = {
    "messages": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q", "name": "me"},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL, SPELT]},
            {"role": "tool", "content": "7", "tool_call_id": "1", "name": "f"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}, FUNCTION],
    },
    "pairs": {"prompt": "q", "chosen": "a", "rejected": [{"role": "assistant", "content": "b"}], "system": "s"},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
    "alpaca": {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["a", "b"]]},
    "query": {"query": "q", "response": "a", "history": [["a", "b"]]},
    "completion": {"prompt": "q", "completion": "a"},
    "text": {"text": "abc"},
}
OTHER = (True, 0, 1.5, float("inf"), float("nan"), [1], {"a": 1}, "\ud800")
FREE = ("arguments", "parameters")
"""Within these stands what the row's author likes, as long as it is JSON."""


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where the texts of a row stand."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))
    if isinstance(value, (str, int)) or value is None:
        yield path


def replaced(row: Any, path: tuple[Any, ...], value: Any) -> Any:
    row = copy.deepcopy(row)
    inner = row
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return row


def fits(path: tuple[Any, ...], value: Any) -> bool:
    """Whether a format allows a value at a place of its good row."""
    if any(key in FREE for key in path[:-1]):
        return value != "\ud800" and (not isinstance(value, float) or math.isfinite(value))
    whole = path[-1] == "arguments" and isinstance(value, dict)
    return whole or (path[-1] == "id" and type(value) is int)


CASES = [(name, path) for name, row in GOOD.items() for path in paths(row)]


@pytest.mark.parametrize("name", GOOD)
def test_the_rows_are_good(name: str) -> None:
    assert isinstance(row_to_document(GOOD[name], "r", "r: row 1", ColumnMapping("text", ())), Document)


@pytest.mark.parametrize(("name", "path"), CASES, ids=[f"{name}-{'.'.join(map(str, path))}" for name, path in CASES])
def test_a_field_of_another_type_is_refused(name: str, path: tuple[Any, ...]) -> None:
    for value in OTHER:
        made = row_to_document(replaced(GOOD[name], path, value), "r", "r: row 1", ColumnMapping("text", ()))
        if fits(path, value):
            assert isinstance(made, Document), (path, value, made)
        else:
            assert isinstance(made, RowIssue) and "r: row 1: " in str(made), (path, value, made)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"function": {"name": [1], "arguments": {}}}, "message 2: call 1: name is a list, not the name of a function"),
        ({"function": {"name": "f", "arguments": [1]}}, "call 1: arguments is a list, not an object or JSON in a text"),
        ({"function": {"name": "f", "arguments": {"x": float("inf")}}}, "has the number inf, which JSON does not"),
        ({"function": {"arguments": {}}}, "call 1: name is null"),
        ({"function": "f"}, "call 1: function is text, not an object"),
        ("f", "call 1 is text, not an object"),
    ],
)
def test_calls_that_no_template_should_print(call: Any, told: str) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    made = row_to_document(row, "r", "r: row 1", ColumnMapping("text", ()))
    assert isinstance(made, RowIssue) and told in str(made)


def test_texts_with_pictures_are_refused() -> None:
    row = {"text": "<image>hello", "images": ["x.png"]}
    made = row_to_document(row, "r", "r: row 1", ColumnMapping("text", ()))
    assert isinstance(made, RowIssue) and 'column "images" holds pictures' in str(made)
    assert isinstance(row_to_document({**row, "images": []}, "r", "r: row 1", ColumnMapping("text", ())), Document)
