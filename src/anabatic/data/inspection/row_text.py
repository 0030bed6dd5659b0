"""The text of a row that is compared with others'."""

from __future__ import annotations

import json
from typing import NamedTuple

from anabatic.data.readers.document import Document, Message


class RowText(NamedTuple):
    """Text of a row.

    Attributes:
        text: a text, or what the turns of a conversation say, of pairs with the worse answer.
        question: what the user says in a conversation.
        context: system prompt and tools, which many rows share: two rows that differ in them alone are not equal, but
            nearly so.
    """

    text: str
    question: str = ""
    context: str = ""


def read_row_text(document: Document) -> RowText:
    """Return what a row says."""
    if document.messages is None:
        return RowText(document.text or "")
    system = [turn for turn in document.messages if turn.get("role") in ("system", "developer")]
    turns = [turn for turn in document.messages if turn not in system]
    question = [turn for turn in turns if turn.get("role") == "user"]
    if document.rejected is not None:
        turns += document.rejected[-1:]
    tools = json.dumps(document.tools, ensure_ascii=False) if document.tools else ""
    return RowText(_join_turns(turns), _join_turns(question), _join_turns(system) + tools)


def _join_turns(turns: list[Message]) -> str:
    return "\n".join(map(get_turn_text, turns))


def get_turn_text(turn: Message) -> str:
    """Return what a turn says: reasoning, content, calls of tools."""
    calls = turn.get("tool_calls")
    parts = [turn.get("reasoning_content"), turn.get("content"), calls and json.dumps(calls, ensure_ascii=False)]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part)
