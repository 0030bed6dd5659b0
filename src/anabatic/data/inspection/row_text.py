"""The text of a row that is compared with others'."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from anabatic.data.inspection.fingerprints import hash_ngrams, hash_text, normalize_text
from anabatic.data.readers.document import Document, Message


class RowText(NamedTuple):
    """Text of a row.

    Attributes:
        text: a text, or what the turns of a conversation say, of pairs with the worse answer.
        question: what the user says in a conversation.
        context: system prompt and tools, which many rows share: two rows that differ in them alone are not equal, but
            nearly so.
        pictures: paths and data URIs: rows that differ in them are not alike, whatever they say.
    """

    text: str
    question: str = ""
    context: str = ""
    pictures: str = ""

    def hash_ngrams(self, size: int) -> np.ndarray:
        """Return the hashes of the text's n-grams of `size` bytes, uint64; others for other pictures."""
        hashes = hash_ngrams(normalize_text(self.text), size)
        return hashes ^ np.uint64(hash_text(self.pictures)) if self.pictures else hashes

    def hash_whole(self, part: str) -> int:
        """Return the hash of a part of the row with its context and its pictures."""
        return hash_text(normalize_text(part), normalize_text(self.context), self.pictures)


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
    return RowText(_join_turns(turns), _join_turns(question), _join_turns(system) + tools, "\n".join(document.pictures))


def _join_turns(turns: list[Message]) -> str:
    return "\n".join(map(get_turn_text, turns))


def get_turn_text(turn: Message) -> str:
    """Return what a turn says: reasoning, content, calls of tools."""
    calls = turn.get("tool_calls")
    parts = [turn.get("reasoning_content"), turn.get("content"), calls and json.dumps(calls, ensure_ascii=False)]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part)
