"""Rows of JSON lines and Parquet files: which shape is it, and is it well formed?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from anabatic.core.text import did_you_mean
from anabatic.data.document import Document, Message, Problem

ROLES = ("system", "developer", "user", "assistant", "tool")

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
"""Role names of ShareGPT-style `conversations` rows."""

CONVERSATION_COLUMNS = ("messages", "conversations", "instruction", "input", "output", "system", "tools")
"""Columns that make a row a conversation, beside the text column."""

_SHAPE = 'a conversation needs "messages": [{"role": "user", "content": "..."}, ...]'


class _BadRow(Exception):
    """What is wrong with a row, without its place."""


def to_document(row: Any, doc_id: str, place: str, text_column: str) -> Document | Problem | None:
    """Return a row as text or conversation, `None` when its text is empty, or what is wrong with it.

    `messages` (role and content) wins, then the text column, then ShareGPT's `conversations` (from and
    value), then Alpaca's `instruction`, `input`, `output`.

    Args:
        row: the parsed row.
        doc_id: id of the document.
        place: file and line, as it appears in messages.
        text_column: key of plain text.
    """
    try:
        if not isinstance(row, dict):
            raise _BadRow(f"the row is {_kind(row)}, not an object")
        if row.get("messages") is not None:
            return Document(None, _messages(row["messages"]), doc_id, _tools(row))
        if text_column in row:
            return _text(row[text_column], doc_id, text_column)
        if row.get("conversations") is not None:
            return Document(None, _sharegpt(row), doc_id, _tools(row))
        if "instruction" in row and "output" in row:
            return Document(None, _alpaca(row), doc_id)
    except _BadRow as error:
        return Problem(
            f"{place}: {error}", f"mend the row, or pass over such rows with data.on_bad_row: skip; {_SHAPE}"
        )
    return Problem(f'{place}: no column "{text_column}"; the row has {listed(row)}', missing_hint(text_column, row))


def missing_hint(text_column: str, columns: Mapping[str, Any] | list[str]) -> str:
    """Return what to do when neither the text column nor a conversation is there."""
    nearest = did_you_mean(text_column, columns)
    return f"name the column of the text with --data.text-column NAME.{nearest} Otherwise: {_SHAPE}"


def listed(columns: Mapping[str, Any] | list[str]) -> str:
    """Return column names for a message, at most twelve."""
    names = [f'"{name}"' for name in columns]
    if not names:
        return "no columns"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _text(value: Any, doc_id: str, column: str) -> Document | None:
    if not isinstance(value, str):
        raise _BadRow(f'column "{column}" is {_kind(value)}, not text')
    return Document(_encodable(value, column), None, doc_id) if value else None


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _BadRow(f'"messages" is {_kind(value)}, not a list of turns' if value != [] else '"messages" is empty')
    return [_turn(turn, index) for index, turn in enumerate(value, start=1)]


def _turn(turn: Any, index: int) -> Message:
    if not isinstance(turn, dict):
        raise _BadRow(f"message {index} is {_kind(turn)}, not an object")
    role = turn.get("role")
    if role not in ROLES:
        near = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise _BadRow(f"message {index} has the role {role!r}, not one of {', '.join(ROLES)}.{near}")
    clean: Message = {key: item for key, item in turn.items() if item is not None}
    speaks_otherwise = clean.get("tool_calls") or clean.get("reasoning_content")
    content = clean.setdefault("content", "" if speaks_otherwise else None)
    if not isinstance(content, str):
        raise _BadRow(f"message {index}: content is {_kind(content)}, not text")
    _encodable(content, f"content of message {index}")
    return clean


def _sharegpt(row: Mapping[str, Any]) -> list[Message]:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise _BadRow('"conversations" is not a list of turns, or is empty')
    messages: list[Message] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for index, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or turn.get("from") not in SHAREGPT_ROLES:
            found = repr(turn.get("from")) if isinstance(turn, dict) else _kind(turn)
            raise _BadRow(f'turn {index} has "from" {found}, not one of {", ".join(SHAREGPT_ROLES)}')
        message: Message = {"role": SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")}
        if turn["from"] == "function_call":
            message = {"role": "assistant", "content": "", "tool_calls": _calls(turn.get("value"), index)}
        messages.append(_turn(message, index))
    return messages


def _calls(value: Any, index: int) -> list[dict[str, Any]]:
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError) as error:
        raise _BadRow(f"turn {index}: the function call is not JSON ({error})") from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise _BadRow(f'turn {index}: a function call needs "name" and "arguments"')
    return [{"type": "function", "function": call} for call in calls]


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    parts = {key: row.get(key) or "" for key in ("system", "instruction", "input", "output")}
    for key, value in parts.items():
        if not isinstance(value, str):
            raise _BadRow(f'column "{key}" is {_kind(value)}, not text')
    question = "\n".join(part for part in (parts["instruction"], parts["input"]) if part)
    if not question:
        raise _BadRow('"instruction" and "input" are both empty')
    system = [{"role": "system", "content": parts["system"]}] if parts["system"] else []
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": parts["output"]}]
    return [_turn(turn, index) for index, turn in enumerate(system + turns, start=1)]


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise _BadRow(f'"tools" is not JSON ({error})') from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _BadRow('"tools" is not a list of function descriptions')
    return tools


def _encodable(text: str, where: str) -> str:
    """JSON can spell half of a surrogate pair, which no UTF-8 text can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRow(f"{where} has a lone surrogate at character {error.start}") from error
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"a number ({value})" if isinstance(value, (int, float)) else type(value).__name__)
