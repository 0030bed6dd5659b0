"""The shapes of conversation rows in circulation, told apart by their columns alone.

Row formats, first match wins: preference pairs (`chosen` and `rejected`, or `rejected_response` or `rejected_messages`
beside the better answer), messages (OpenAI), ShareGPT (`conversations` of `from`/`value`), alpaca (`instruction`,
`input`, `output`), query/response, prompt/completion.
`system`, `history` and `tools` are understood beside all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anabatic.core import json_text
from anabatic.core.text import did_you_mean
from anabatic.data import media
from anabatic.data.calls import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START
from anabatic.data.document import Message
from anabatic.data.turn_fields import BadRow, check_tools, check_turn, check_values, encodable, kind_of

ROLES = ("system", "developer", "user", "assistant", "tool")

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool_response": "tool",
    "tool": "tool",
}
"""Role names of ShareGPT-style rows (LLaMA-Factory's and ms-swift's data sets)."""


@dataclass(frozen=True)
class Conversation:
    """A row as turns; of a preference pair `messages` is the chosen one.

    Attributes:
        rejected: the other answer with the turns before it, for preference pairs.
        tools: JSON schemas of the functions that may be called.
    """

    messages: list[Message]
    rejected: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """One row shape: its name, the columns that tell it, and how it is read."""

    name: str
    needs: tuple[str, ...]
    read: Callable[[Row], Conversation]
    takes: tuple[str, ...] = ()
    """Columns that are read where they are present."""


def find(columns: Mapping[str, Any] | list[str]) -> Format | None:
    """Return the format of rows with these columns."""
    return next((one for one in FORMATS if all(name in columns for name in one.needs)), None)


def question(row: Row) -> Conversation | None:
    """Return the turns of a row that an answer follows (a conversation may end with one); None: nothing is asked.

    Raises:
        BadRow: the row is not well formed.
    """
    turns = _before(row)
    if not turns:
        return None
    begins = _system(row) if turns[0]["role"] not in ("system", "developer") else []
    return Conversation([*begins, *_history(row), *turns], None, _tools(row))


def _messages_row(row: Row) -> Conversation:
    return Conversation(_system(row) + turns(row["messages"], "messages"), None, _tools(row))


def _preference(row: Row) -> Conversation:
    system, before = _system(row), _before(row)
    chosen, rejected = (_side(system, before, row[key], key) for key in ("chosen", "rejected"))
    return Conversation(chosen, rejected, _tools(row))


def _side(system: list[Message], before: list[Message], value: Any, key: str) -> list[Message]:
    said = _answer(value, key, before)
    whole = said[0]["role"] not in ("assistant", "tool")  # it repeats what comes before it
    if whole and said[0]["role"] == "system":
        return said
    return system + said if whole else system + before + said


def _rejected_messages(row: Row) -> Conversation:
    chosen = _messages_row(row)
    if row["rejected_messages"] is None:
        return chosen
    return Conversation(
        chosen.messages, _side(_system(row), [], row["rejected_messages"], "rejected_messages"), chosen.tools
    )


def _rejected_response(read: Callable[[Row], Conversation]) -> Callable[[Row], Conversation]:
    """Rows of ms-swift: the better answer ends the conversation, the other one stands beside it."""

    def pair(row: Row) -> Conversation:
        chosen = read(row)
        if row["rejected_response"] is None:
            return chosen
        if chosen.messages[-1]["role"] != "assistant":
            raise BadRow('"rejected_response" needs a conversation that ends with the assistant\'s better answer')
        rejected = _said("assistant", row["rejected_response"], "rejected_response")
        return Conversation(chosen.messages, [*chosen.messages[:-1], rejected], chosen.tools)

    return pair


def _before(row: Row) -> list[Message]:
    """The turns that both answers of a preference pair follow; none when each brings the whole conversation."""
    for key in ("messages", "conversations"):
        if row.get(key):
            return turns(row[key], key)
    for key in ("prompt", "query", "question"):
        if row.get(key):
            return turns(row[key], key) if isinstance(row[key], list) else [_said("user", row[key], key)]
    if row.get("instruction"):
        return [_said("user", _question(row), "instruction")]
    return []


def _answer(value: Any, key: str, before: list[Message]) -> list[Message]:
    if isinstance(value, list):
        return turns(value, key)
    if isinstance(value, dict):
        return turns([value], key)
    if not before:
        raise BadRow(f'"{key}" is text, but no prompt, query, instruction or conversations come before it')
    return [_said("assistant", value, key)]


def _sharegpt(row: Row) -> Conversation:
    return Conversation(_system(row) + turns(row["conversations"], "conversations"), None, _tools(row))


def _alpaca(row: Row) -> Conversation:
    ends = [_said("user", _question(row), "instruction"), _said("assistant", row["output"], "output")]
    return Conversation(_system(row) + _history(row) + ends, None, _tools(row))


def _question(row: Row) -> str:
    parts = {key: _text(row.get(key), key) for key in ("instruction", "input")}
    question = "\n".join(part for part in parts.values() if part)
    if not question:
        raise BadRow('"instruction" and "input" are both empty')
    return question


def _pair(question: str, answer: str) -> Callable[[Row], Conversation]:
    def read(row: Row) -> Conversation:
        asked, said = row[question], row[answer]
        before = turns(asked, question) if isinstance(asked, list) else [_said("user", asked, question)]
        after = turns(said, answer) if isinstance(said, list) else [_said("assistant", said, answer)]
        return Conversation(_system(row) + _history(row) + before + after, None, _tools(row))

    return read


_BESIDE = ("system", "history", "tools")

FORMATS = (
    Format(
        "preference pairs",
        ("chosen", "rejected"),
        _preference,
        ("messages", "conversations", "prompt", "query", "question", "instruction", "input", *_BESIDE),
    ),
    Format(
        "preference pairs", ("messages", "rejected_response"), _rejected_response(_messages_row), ("system", "tools")
    ),
    Format("preference pairs", ("messages", "rejected_messages"), _rejected_messages, ("system", "tools")),
    Format(
        "preference pairs",
        ("query", "response", "rejected_response"),
        _rejected_response(_pair("query", "response")),
        _BESIDE,
    ),
    Format("messages", ("messages",), _messages_row, ("system", "tools")),
    Format("ShareGPT conversations", ("conversations",), _sharegpt, ("system", "tools")),
    Format("alpaca", ("instruction", "output"), _alpaca, ("input", *_BESIDE)),
    Format("query and response", ("query", "response"), _pair("query", "response"), _BESIDE),
    Format("prompt and completion", ("prompt", "completion"), _pair("prompt", "completion"), _BESIDE),
    Format("prompt and response", ("prompt", "response"), _pair("prompt", "response"), _BESIDE),
    Format("question and answer", ("question", "answer"), _pair("question", "answer"), _BESIDE),
)


def turns(value: Any, column: str) -> list[Message]:
    """Return the checked turns of a list in either spelling: role/content or from/value.

    Raises:
        BadRow: no list (nor text that spells one in JSON, as tables do), an empty one, an unknown role, content that
            is not text.
    """
    value = _unspelt(value)
    if not isinstance(value, list) or not value:
        raise BadRow(f'"{column}" is empty' if value == [] else f'"{column}" is {kind_of(value)}, not a list of turns')
    return [_turn(turn, index) for index, turn in enumerate(value, start=1)]


def _turn(turn: Any, index: int) -> Message:
    if not isinstance(turn, dict):
        raise BadRow(f"message {index} is {kind_of(turn)}, not an object")
    if "role" not in turn and "from" in turn:
        turn = _from_value(turn, index)
    role = turn.get("role")
    if role not in ROLES:
        near = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise BadRow(f"message {index} has the role {_shown(role)}, not one of {', '.join(ROLES)}.{near}")
    clean: Message = {key: item for key, item in turn.items() if item is not None}
    speaks_otherwise = clean.get("tool_calls") or clean.get("reasoning_content")
    if kind := media.part(clean.get("content")):
        raise BadRow(f'message {index} has a part of the type "{kind}": pictures, video and sound are not supported')
    clean["content"] = _joined(clean.get("content", "" if speaks_otherwise else None))
    check_turn(clean, index)
    for key, item in clean.items():
        check_values(item, f"{key} of message {index}")
    return clean


def _joined(content: Any) -> Any:
    """Return the text of a list of text parts, as chat APIs also write content; anything else as it is.

    Parts of the types `python` and `python_output` are calls of the python tool (nanochat's conversations).
    """
    if not isinstance(content, list) or not content:
        return content
    texts = [
        _FRAMES[part["type"]].format(part["text"]) for part in content if isinstance(part, dict) and _is_text(part)
    ]
    return "".join(texts) if len(texts) == len(content) else content


_FRAMES = {
    "text": "{}",
    "python": f"{PYTHON_START}{{}}{PYTHON_END}",
    "python_output": f"{OUTPUT_START}{{}}{OUTPUT_END}",
}


def _is_text(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in _FRAMES and isinstance(part.get("text"), str)


def _unspelt(value: Any) -> Any:
    """Return the list that `value` spells in JSON, else `value`."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json_text.loads(value)
    except ValueError:
        return value


def _shown(value: Any) -> str:
    """Return a value as a message quotes it."""
    return repr(value)[:80]


def _from_value(turn: dict[str, Any], index: int) -> dict[str, Any]:
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        near = did_you_mean(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) else ""
        raise BadRow(f'message {index} has "from" {_shown(speaker)}, not one of {", ".join(SHAREGPT_ROLES)}.{near}')
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    if speaker in ("function_call", "tool_call"):
        return {**rest, "role": "assistant", "content": "", "tool_calls": _calls(turn.get("value"), index)}
    return {**rest, "role": SHAREGPT_ROLES[speaker], "content": turn.get("value")}


def _calls(value: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(value, str):
        raise BadRow(f"message {index}: the function call is {kind_of(value)}, not JSON in a text")
    try:
        parsed = json_text.loads(value)
    except ValueError as error:
        raise BadRow(f"message {index}: the function call is not JSON ({error})") from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRow(f'message {index}: a function call needs "name" and "arguments"')
    return [{"type": "function", "function": call} for call in calls]


def _said(role: str, value: Any, column: str) -> Message:
    text = _text(value, column)
    if not text and role == "assistant":
        raise BadRow(f'"{column}" is empty: nothing to learn')
    if not text:
        raise BadRow(f'"{column}" is empty')
    return {"role": role, "content": text}


def _text(value: Any, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRow(f'column "{column}" is {kind_of(value)}, not text')
    return encodable(value, f'column "{column}"')


def _system(row: Row) -> list[Message]:
    text = _text(row.get("system"), "system")
    return [{"role": "system", "content": text}] if text else []


def _history(row: Row) -> list[Message]:
    """Earlier turns as `[[question, answer], ...]`."""
    history = _unspelt(row.get("history"))
    if history in (None, "", []):
        return []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow('"history" is not a list of [question, answer] pairs')
    return [
        _said(role, text, "history") for pair in history for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _tools(row: Row) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json_text.loads(tools)
        except ValueError as error:
            raise BadRow(f'"tools" is not JSON ({error})') from error
    if tools in (None, "", [], {}):
        return None
    check_values(tools, '"tools"')
    check_tools(tools)
    return list(tools)
