"""Formats of conversation rows, detected by their columns; rows with images, video or audio are refused.

Row formats, first match wins: preference pairs (`chosen` and `rejected`, or `rejected_response` or `rejected_messages`
beside the better answer), messages (OpenAI), ShareGPT (`conversations` of `from`/`value`), alpaca (`instruction`,
`input`, `output`), query/response, prompt/completion.
`system`, `history` and `tools` are understood beside all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anabatic.core import json_reader
from anabatic.core.formatting import did_you_mean
from anabatic.data.chat.python_tool import OUTPUT_END, OUTPUT_START, PYTHON_END, PYTHON_START
from anabatic.data.chat.turn_fields import (
    BadRowError,
    check_json_values,
    check_tools,
    check_turn,
    json_type_name,
    require_encodable_text,
)
from anabatic.data.readers.document import Message

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
    "function": "tool",
}
"""Role names of ShareGPT-style rows and of agents' (LLaMA-Factory's and ms-swift's data sets, OpenAI's older form)."""
_CALL_ROLES = ("function_call", "tool_call")


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


RawColumns = Mapping[str, Any]


@dataclass(frozen=True)
class ConversationFormat:
    """One row shape: its name, the columns that tell it, and how it is read."""

    name: str
    required_columns: tuple[str, ...]
    parse_row: Callable[[RawColumns], Conversation]
    optional_columns: tuple[str, ...] = ()
    """Columns that are read where they are present."""


def detect_format(columns: Mapping[str, Any] | list[str]) -> ConversationFormat | None:
    """Return the format of rows with these columns."""
    return next((one for one in FORMATS if all(name in columns for name in one.required_columns)), None)


def extract_prompt(row: RawColumns) -> Conversation | None:
    """Return the turns of a row that an answer follows (a conversation may end with one); None: nothing is asked.

    Raises:
        BadRowError: the row is not well formed.
    """
    turns = _parse_prompt_turns(row)
    if not turns:
        return None
    begins = _parse_system_message(row) if turns[0]["role"] not in ("system", "developer") else []
    return Conversation([*begins, *_parse_history(row), *turns], None, _parse_tools(row))


def _parse_messages_row(row: RawColumns) -> Conversation:
    return Conversation(_parse_system_message(row) + parse_turns(row["messages"], "messages"), None, _parse_tools(row))


def _parse_preference_row(row: RawColumns) -> Conversation:
    system, before = _parse_system_message(row), _parse_prompt_turns(row)
    chosen, rejected = (_build_answer_side(system, before, row[key], key) for key in ("chosen", "rejected"))
    return Conversation(chosen, rejected, _parse_tools(row))


def _build_answer_side(system: list[Message], before: list[Message], value: Any, key: str) -> list[Message]:
    answer_turns = _parse_answer_turns(value, key, before)
    is_full_conversation = answer_turns[0]["role"] not in ("assistant", "tool")  # it repeats what comes before it
    if is_full_conversation and answer_turns[0]["role"] == "system":
        return answer_turns
    return system + answer_turns if is_full_conversation else system + before + answer_turns


def _parse_rejected_messages_row(row: RawColumns) -> Conversation:
    chosen = _parse_messages_row(row)
    if row["rejected_messages"] is None:
        return chosen
    return Conversation(
        chosen.messages,
        _build_answer_side(_parse_system_message(row), [], row["rejected_messages"], "rejected_messages"),
        chosen.tools,
    )


def _with_rejected_response(read: Callable[[RawColumns], Conversation]) -> Callable[[RawColumns], Conversation]:
    """Rows of ms-swift: the better answer ends the conversation, the other one stands beside it."""

    def parse_pair(row: RawColumns) -> Conversation:
        chosen = read(row)
        if row["rejected_response"] is None:
            return chosen
        if chosen.messages[-1]["role"] != "assistant":
            raise BadRowError('"rejected_response" needs a conversation that ends with the assistant\'s better answer')
        rejected = _build_message("assistant", row["rejected_response"], "rejected_response")
        return Conversation(chosen.messages, [*chosen.messages[:-1], rejected], chosen.tools)

    return parse_pair


def _parse_prompt_turns(row: RawColumns) -> list[Message]:
    """The turns that both answers of a preference pair follow; none when each brings the whole conversation."""
    for key in ("messages", "conversations"):
        if row.get(key):
            return parse_turns(row[key], key)
    for key in ("prompt", "query", "question"):
        if row.get(key):
            return parse_turns(row[key], key) if isinstance(row[key], list) else [_build_message("user", row[key], key)]
    if row.get("instruction"):
        return [_build_message("user", _join_instruction(row), "instruction")]
    return []


def _parse_answer_turns(value: Any, key: str, before: list[Message]) -> list[Message]:
    if isinstance(value, list):
        return parse_turns(value, key)
    if isinstance(value, dict):
        return parse_turns([value], key)
    if not before:
        raise BadRowError(f'"{key}" is text, but no prompt, query, instruction or conversations come before it')
    return [_build_message("assistant", value, key)]


def _parse_sharegpt_row(row: RawColumns) -> Conversation:
    return Conversation(
        _parse_system_message(row) + parse_turns(row["conversations"], "conversations"), None, _parse_tools(row)
    )


def _parse_alpaca_row(row: RawColumns) -> Conversation:
    ends = [
        _build_message("user", _join_instruction(row), "instruction"),
        _build_message("assistant", row["output"], "output"),
    ]
    return Conversation(_parse_system_message(row) + _parse_history(row) + ends, None, _parse_tools(row))


def _join_instruction(row: RawColumns) -> str:
    parts = {key: _read_text_column(row.get(key), key) for key in ("instruction", "input")}
    question = "\n".join(part for part in parts.values() if part)
    if not question:
        raise BadRowError('"instruction" and "input" are both empty')
    return question


def _prompt_response_parser(question: str, answer: str) -> Callable[[RawColumns], Conversation]:
    def parse_pair(row: RawColumns) -> Conversation:
        prompt, response = row[question], row[answer]
        before = (
            parse_turns(prompt, question) if isinstance(prompt, list) else [_build_message("user", prompt, question)]
        )
        after = (
            parse_turns(response, answer)
            if isinstance(response, list)
            else [_build_message("assistant", response, answer)]
        )
        return Conversation(_parse_system_message(row) + _parse_history(row) + before + after, None, _parse_tools(row))

    return parse_pair


_COMMON_COLUMNS = ("system", "history", "tools")

FORMATS = (
    ConversationFormat(
        "preference pairs",
        ("chosen", "rejected"),
        _parse_preference_row,
        ("messages", "conversations", "prompt", "query", "question", "instruction", "input", *_COMMON_COLUMNS),
    ),
    ConversationFormat(
        "preference pairs",
        ("messages", "rejected_response"),
        _with_rejected_response(_parse_messages_row),
        ("system", "tools"),
    ),
    ConversationFormat(
        "preference pairs", ("messages", "rejected_messages"), _parse_rejected_messages_row, ("system", "tools")
    ),
    ConversationFormat(
        "preference pairs",
        ("query", "response", "rejected_response"),
        _with_rejected_response(_prompt_response_parser("query", "response")),
        _COMMON_COLUMNS,
    ),
    ConversationFormat("messages", ("messages",), _parse_messages_row, ("system", "tools")),
    ConversationFormat("ShareGPT conversations", ("conversations",), _parse_sharegpt_row, ("system", "tools")),
    ConversationFormat("alpaca", ("instruction", "output"), _parse_alpaca_row, ("input", *_COMMON_COLUMNS)),
    ConversationFormat(
        "query and response", ("query", "response"), _prompt_response_parser("query", "response"), _COMMON_COLUMNS
    ),
    ConversationFormat(
        "prompt and completion",
        ("prompt", "completion"),
        _prompt_response_parser("prompt", "completion"),
        _COMMON_COLUMNS,
    ),
    ConversationFormat(
        "prompt and response", ("prompt", "response"), _prompt_response_parser("prompt", "response"), _COMMON_COLUMNS
    ),
    ConversationFormat(
        "question and answer", ("question", "answer"), _prompt_response_parser("question", "answer"), _COMMON_COLUMNS
    ),
)


def parse_turns(value: Any, column: str) -> list[Message]:
    """Return the checked turns of a list in either spelling: role/content or from/value.

    Raises:
        BadRowError: no list (nor text that spells one in JSON, as tables do), an empty one, an unknown role, content
            that is not text.
    """
    value = parse_json_list(value)
    if not isinstance(value, list) or not value:
        raise BadRowError(
            f'"{column}" is empty' if value == [] else f'"{column}" is {json_type_name(value)}, not a list of turns'
        )
    turns: list[Message] = []
    for index, raw in enumerate(value, start=1):
        turn, is_call = _parse_turn(raw, index)
        if not (is_call and turns and _join_calls(turns[-1], turn)):
            turns.append(turn)
    return turns


def is_list_of_turns(row: Any) -> bool:
    """Return whether a row is a conversation without a column around it (nanochat's identity conversations)."""
    return (
        isinstance(row, list)
        and bool(row)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in row)
    )


def _join_calls(before: Message, turn: Message) -> bool:
    """Add the calls of a turn to the assistant's turn before it; False: that one is another's, or learned otherwise."""
    if before["role"] != "assistant" or any(before.get(key) != turn.get(key) for key in ("weight", "loss")):
        return False
    before["tool_calls"] = [*before.get("tool_calls", []), *turn["tool_calls"]]
    return True


def _parse_turn(turn: Any, index: int) -> tuple[Message, bool]:
    """Return a checked turn, and whether it is nothing but calls under a role of their own."""
    if not isinstance(turn, dict):
        raise BadRowError(f"message {index} is {json_type_name(turn)}, not an object")
    if "role" not in turn and "from" in turn:
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            near = did_you_mean(speaker, SHAREGPT_ROLES) if isinstance(speaker, str) else ""
            raise BadRowError(
                f'message {index} has "from" {_quote_value(speaker)}, not one of {", ".join(SHAREGPT_ROLES)}.{near}'
            )
        rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
        turn = {**rest, "role": speaker, "content": turn.get("value")}
    turn, is_call = _convert_role(turn, index)
    role = turn.get("role")
    if role not in ROLES:
        near = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise BadRowError(f"message {index} has the role {_quote_value(role)}, not one of {', '.join(ROLES)}.{near}")
    clean: Message = {key: item for key, item in turn.items() if item is not None}
    speaks_otherwise = clean.get("tool_calls") or clean.get("reasoning_content")
    if kind := find_media_part(clean.get("content")):
        raise BadRowError(
            f'message {index} has a part of the type "{kind}": pictures, video and sound are not supported'
        )
    clean["content"] = _join_content_parts(clean.get("content", "" if speaks_otherwise else None))
    check_turn(clean, index)
    for key, item in clean.items():
        check_json_values(item, f"{key} of message {index}")
    return clean, is_call


def _join_content_parts(content: Any) -> Any:
    """Return the text of a list of text parts, as chat APIs also write content; anything else as it is.

    Parts of the types `python` and `python_output` are calls of the python tool (nanochat's conversations).
    """
    if not isinstance(content, list) or not content:
        return content
    texts = [
        _PART_TEMPLATES[part["type"]].format(part["text"])
        for part in content
        if isinstance(part, dict) and _is_text_part(part)
    ]
    return "".join(texts) if len(texts) == len(content) else content


_PART_TEMPLATES = {
    "text": "{}",
    "python": f"{PYTHON_START}{{}}{PYTHON_END}",
    "python_output": f"{OUTPUT_START}{{}}{OUTPUT_END}",
}


def _is_text_part(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in _PART_TEMPLATES and isinstance(part.get("text"), str)


def parse_json_list(value: Any) -> Any:
    """Return the list that `value` spells in JSON, else `value`."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json_reader.loads(value)
    except ValueError:
        return value


def _quote_value(value: Any) -> str:
    """Return a value as a message quotes it."""
    return repr(value)[:80]


def _convert_role(turn: dict[str, Any], index: int) -> tuple[dict[str, Any], bool]:
    """Return a turn under a role of chat templates: `tool_call` and `function_call` are calls of the assistant,
    `tool_response`, `observation` and `function` their results. True: it is nothing but calls."""
    role = turn.get("role")
    if role in _CALL_ROLES:
        calls = _parse_function_calls(turn.get("content"), index)
        return {**turn, "role": "assistant", "content": "", "tool_calls": calls}, True
    if turn.get("function_call") and not turn.get("tool_calls"):  # OpenAI's form before tools
        rest = {key: item for key, item in turn.items() if key != "function_call"}
        return {**rest, "tool_calls": _parse_function_calls(turn["function_call"], index)}, False
    known = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return (turn if known == role else {**turn, "role": known}), False


def _parse_function_calls(value: Any, index: int) -> list[dict[str, Any]]:
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json_reader.loads(value)
        except ValueError as error:
            raise BadRowError(f"message {index}: the function call is not JSON ({error})") from error
    elif not isinstance(value, (dict, list)):
        raise BadRowError(f"message {index}: the function call is {json_type_name(value)}, not JSON in a text")
    calls = parsed if isinstance(parsed, list) else [parsed]
    functions = [_unwrap_call(call) for call in calls]
    if not functions or not all(isinstance(call, dict) and "name" in call for call in functions):
        raise BadRowError(f'message {index}: a function call needs "name" and "arguments"')
    return [{"type": "function", "function": call} for call in functions]


def _unwrap_call(call: Any) -> Any:
    """Return the function of a call that is wrapped as OpenAI does."""
    return call["function"] if isinstance(call, dict) and "name" not in call and "function" in call else call


def _build_message(role: str, value: Any, column: str) -> Message:
    text = _read_text_column(value, column)
    if not text and role == "assistant":
        raise BadRowError(f'"{column}" is empty: nothing to learn')
    if not text:
        raise BadRowError(f'"{column}" is empty')
    return {"role": role, "content": text}


def _read_text_column(value: Any, column: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRowError(f'column "{column}" is {json_type_name(value)}, not text')
    return require_encodable_text(value, f'column "{column}"')


def _parse_system_message(row: RawColumns) -> list[Message]:
    text = _read_text_column(row.get("system"), "system")
    return [{"role": "system", "content": text}] if text else []


def _parse_history(row: RawColumns) -> list[Message]:
    """Earlier turns as `[[question, answer], ...]`."""
    history = parse_json_list(row.get("history"))
    if history in (None, "", []):
        return []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRowError('"history" is not a list of [question, answer] pairs')
    return [
        _build_message(role, text, "history")
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _parse_tools(row: RawColumns) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json_reader.loads(tools)
        except ValueError as error:
            raise BadRowError(f'"tools" is not JSON ({error})') from error
    if tools in (None, "", [], {}):
        return None
    check_json_values(tools, '"tools"')
    check_tools(tools)
    return list(tools)


MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
"""Of LLaMA-Factory's and ms-swift's rows (`images`, `videos`, `audios`) and Llava's (`image`, `video`)."""
SEEING_COLUMNS = (*MEDIA_COLUMNS, "objects")
"""Further columns of rows for a model that sees: names and places of objects in its pictures (ms-swift)."""
_EMPTY_VALUES = ("", "[]", "null")
_MEDIA_PART_TYPES = ("image", "video", "audio", "file")
"""In the type of a content part: `image`, `image_url`, `input_image`, `input_audio`, `video_url`, `file`."""
TEXT_ONLY_HINT = "models of text alone are trained and asked: use rows of text"
"""Possible fix."""


def find_media_column(row: Mapping[str, Any]) -> str:
    """Return the first column of a row that holds pictures, video or sound; empty: none does."""
    return next((name for name in MEDIA_COLUMNS if name in row and _has_content(row[name])), "")


def find_media_part(content: Any) -> str:
    """Return the type of the first part of a message's content that is no text; empty: there is none."""
    for one in content if isinstance(content, list) else ():
        kind = one.get("type") if isinstance(one, Mapping) else None
        if isinstance(kind, str) and any(word in kind for word in _MEDIA_PART_TYPES):
            return kind
    return ""


def _has_content(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() not in _EMPTY_VALUES
    if isinstance(value, (list, tuple)):
        return any(_has_content(one) for one in value)
    return isinstance(value, (Mapping, bytes)) and bool(value)
