"""Calls of tools in what a model says: found while the text comes, at whatever place it is cut.

Two ways of writing them are known. Hermes and Qwen (from 2.5): `<tool_call>` JSON with `name` and `arguments`
`</tool_call>`, among other text. Llama 3: the answer is JSON with `name` and `parameters`, several divided by
semicolons (Meta's "Model Cards & Prompt formats", Llama 3.1 and 3.2). Which one a model was taught is asked of its
chat template. What is malformed, or calls a tool that was not offered, stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from anabatic.core import json_reader
from anabatic.core.errors import AnabaticError
from anabatic.data.tokenizer.hf_folder import render_chat
from anabatic.infer.text_stream import measure_overlap

ToolCallStyle = Literal["hermes", "llama3"]
VLLM_PARSERS: dict[ToolCallStyle, str] = {"hermes": "hermes", "llama3": "llama3_json"}
"""What vLLM calls the two (docs.vllm.ai, "Tool Calling")."""
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_PROBE_NAME = "probe0name"


@dataclass(frozen=True)
class ParsedCall:
    """A tool, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedSegment:
    """A part of an answer.

    Attributes:
        raw: the part as it was written; all parts together are the answer.
        text: what is said of it.
        call: what it calls.
    """

    raw: str
    text: str = ""
    call: ParsedCall | None = None


class ToolCallParser(Protocol):
    """Takes an answer in pieces."""

    def push_text(self, piece: str) -> list[ParsedSegment]:
        """Return the parts that have become certain."""

    def flush(self) -> list[ParsedSegment]:
        """Return what is left: nothing more will come."""


def detect_style(tokenizer: Any) -> ToolCallStyle | None:
    """Return how a chat template writes calls; None: in no way that is known, or not at all."""
    call = {"id": "call00000", "type": "function", "function": {"name": _PROBE_NAME, "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    text = _render_template(tokenizer, messages, None)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    before, found, after = text.partition(CALL_OPEN)
    if found and CALL_OPEN not in special:
        inner, closed, _ = after.partition(CALL_CLOSE)
        return "hermes" if closed and _parse_call(inner, "arguments", {_PROBE_NAME}) is not None else None
    start = text.find('{"name": "' + _PROBE_NAME)
    if start < 0:
        return None
    end = _JsonObjectScanner().find_end(text, start)
    return "llama3" if end > 0 and _parse_call(text[start:end], "parameters", {_PROBE_NAME}) is not None else None


def shows_tools(tokenizer: Any) -> bool:
    """True when a chat template tells the model of tools."""
    tool = {"type": "function", "function": {"name": _PROBE_NAME, "description": "", "parameters": {"type": "object"}}}
    return _PROBE_NAME in _render_template(tokenizer, [{"role": "user", "content": "a"}], [tool])


def _render_template(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    try:
        return render_chat(tokenizer, messages, tools) if tokenizer.chat_template else ""
    except AnabaticError:
        return ""  # a template that refuses calls writes none


def make_parser(kind: ToolCallStyle, names: Collection[str], several: bool = True) -> ToolCallParser:
    """Return a reader of answers.

    Args:
        names: of the tools that may be called.
        several: more than one call is allowed; what comes behind the first one is text otherwise.
    """
    return _PARSERS[kind](names, several)


class HermesParser:
    """Calls between tags, among other text. Blanks before a call belong to it."""

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        self._names, self._allows_several = names, several
        self._buffer = ""
        self._scanner = _JsonObjectScanner()
        self._num_calls = 0

    def push_text(self, piece: str) -> list[ParsedSegment]:
        """Return the parts that have become certain."""
        self._buffer += piece
        return self._parse_buffer(False)

    def flush(self) -> list[ParsedSegment]:
        """Return what is left."""
        events = self._parse_buffer(True)
        blank, self._buffer = self._buffer, ""
        if blank:
            events.append(ParsedSegment(blank, "" if self._num_calls else blank))
        return events

    def _parse_buffer(self, last: bool) -> list[ParsedSegment]:
        events: list[ParsedSegment] = []
        while True:
            start = self._buffer.find(CALL_OPEN) if self._allows_several or not self._num_calls else -1
            if start < 0:
                kept = 0 if last else measure_overlap(self._buffer, CALL_OPEN)
                self._emit_text(events, len(self._buffer[: len(self._buffer) - kept].rstrip()))
                return events
            self._emit_text(events, len(self._buffer[:start].rstrip()))
            start = self._buffer.find(CALL_OPEN)
            end = self._find_call_end(start + len(CALL_OPEN), last)
            if end == 0:
                return events
            text = self._buffer[start + len(CALL_OPEN) : end].removesuffix(CALL_CLOSE)
            call = _parse_call(text, "arguments", self._names) if end > 0 else None
            self._scanner = _JsonObjectScanner()
            if call is None:
                self._emit_text(events, start + len(CALL_OPEN))
                continue
            events.append(ParsedSegment(self._buffer[:end], call=call))
            self._buffer = self._buffer[end:]
            self._num_calls += 1

    def _find_call_end(self, start: int, last: bool) -> int:
        """Return where the call ends that begins at `start`; 0: further text decides; -1: it is none."""
        end = self._scanner.find_end(self._buffer, start)
        if end > 0:
            rest = self._buffer[end:].lstrip()
            if rest.startswith(CALL_CLOSE):
                return len(self._buffer) - len(rest) + len(CALL_CLOSE)
            end = 0 if CALL_CLOSE.startswith(rest) else -1
        return -1 if last else end

    def _emit_text(self, events: list[ParsedSegment], count: int) -> None:
        if count > 0:
            text, self._buffer = self._buffer[:count], self._buffer[count:]
            self._scanner.shift_position(count)
            events.append(ParsedSegment(text, text))


class Llama3Parser:
    """An answer that is nothing but calls, divided by semicolons."""

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        self._names, self._allows_several = names, several
        self._buffer = ""
        self._scanner = _JsonObjectScanner()
        self._num_calls = 0
        self._is_plain_text = False

    def push_text(self, piece: str) -> list[ParsedSegment]:
        """Return the parts that have become certain."""
        self._buffer += piece
        return self._parse_buffer()

    def flush(self) -> list[ParsedSegment]:
        """Return what is left."""
        events = self._parse_buffer()
        rest, self._buffer = self._buffer, ""
        if rest:
            events.append(ParsedSegment(rest, "" if self._num_calls and not rest.strip(" \t\r\n;") else rest))
        return events

    def _parse_buffer(self) -> list[ParsedSegment]:
        events: list[ParsedSegment] = []
        while not self._is_plain_text:
            start = self._find_call_start()
            end = self._scanner.find_end(self._buffer, start) if start >= 0 else -1
            if end == 0:
                return events
            call = _parse_call(self._buffer[start:end], "parameters", self._names) if end > 0 else None
            if call is None or (self._num_calls and not self._allows_several):
                self._is_plain_text = True
                break
            events.append(ParsedSegment(self._buffer[:end], call=call))
            self._buffer, self._scanner = self._buffer[end:], _JsonObjectScanner()
            self._num_calls += 1
        if self._buffer:
            events.append(ParsedSegment(self._buffer, self._buffer))
            self._buffer = ""
        return events

    def _find_call_start(self) -> int:
        """Return where the next call may begin; -1: none does."""
        found = _CALL_SEPARATOR.match(self._buffer) if self._num_calls else _LEADING_SPACE.match(self._buffer)
        return found.end() if found else -1


_LEADING_SPACE = re.compile(r"\s*")
_CALL_SEPARATOR = re.compile(r"\s*;?\s*$|\s*;\s*(?=\{)")
_PARSERS: dict[ToolCallStyle, Callable[[Collection[str], bool], ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
}


class ForcedCallParser:
    """An answer whose form was prescribed: the arguments of one tool, or a list of calls, each certain when it ends."""

    def __init__(self, names: Collection[str], tool_name: str | None) -> None:
        self._names, self._forced_tool = names, tool_name
        self._buffer = ""
        self._scanner = _JsonObjectScanner()
        self._num_calls = 0
        self._is_plain_text = False

    def push_text(self, piece: str) -> list[ParsedSegment]:
        """Return the calls that have ended; the arguments of one tool are JSON only as a whole."""
        self._buffer += piece
        return [] if self._forced_tool is not None else self._parse_buffer()

    def flush(self) -> list[ParsedSegment]:
        """Return what is left. A call that was cut is given up where others are whole, and stays text otherwise."""
        rest, self._buffer = self._buffer, ""
        if not rest:
            return []
        if self._forced_tool is not None and isinstance(value := _parse_strict_json(rest), dict):
            return [ParsedSegment(rest, call=ParsedCall(self._forced_tool, _dump_arguments(value)))]
        return [ParsedSegment(rest, "" if self._num_calls and not self._is_plain_text else rest)]

    def _parse_buffer(self) -> list[ParsedSegment]:
        events: list[ParsedSegment] = []
        while not self._is_plain_text and (
            found := (_NEXT_FORCED_CALL if self._num_calls else _FIRST_FORCED_CALL).match(self._buffer)
        ):
            end = self._scanner.find_end(self._buffer, found.end())
            if end == 0:
                break
            call = _parse_call(self._buffer[found.end() : end], "parameters", self._names)
            if call is None:
                self._is_plain_text = True
                break
            events.append(ParsedSegment(self._buffer[:end], call=call))
            self._buffer, self._scanner = self._buffer[end:], _JsonObjectScanner()
            self._num_calls += 1
        return events


_FIRST_FORCED_CALL = re.compile(r"\s*\[\s*(?=\{)")
_NEXT_FORCED_CALL = re.compile(r"\s*,\s*(?=\{)")
MAX_FORCED_CALLS = 32
"""In one answer that must call: a small model repeats itself until its answer is cut."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""OpenAI: a function whose parameters are left out has none."""


def build_call_schema(tools: list[dict[str, Any]], tool_name: str | None, several: bool = True) -> dict[str, Any]:
    """Return the JSON schema of an answer that must call: the arguments of the tool `tool_name`, or a list of calls.

    Args:
        tools: as in a request, at least one.
    """
    functions = [tool["function"] for tool in tools]
    arguments = {one["name"]: one.get("parameters") or _NO_PARAMETERS for one in functions}
    if tool_name is not None:
        return dict(arguments[tool_name])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": one},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, one in arguments.items()
    ]
    max_calls = MAX_FORCED_CALLS if several else 1
    return {"type": "array", "minItems": 1, "maxItems": max_calls, "items": {"anyOf": calls}}


class _JsonObjectScanner:
    """Finds the end of a JSON object whose text is not whole yet, each sign looked at once."""

    def __init__(self) -> None:
        self._position, self._depth, self._in_string = 0, 0, False

    def shift_position(self, count: int) -> None:
        """The text has lost so many characters at its beginning."""
        self._position = max(0, self._position - count)

    def find_end(self, text: str, start: int) -> int:
        """Return the index after the object that begins at `start` (or after blanks); 0: not yet; -1: there is none."""
        if not self._depth:
            begin = len(text) - len(text[start:].lstrip())
            if begin == len(text):
                return 0
            if text[begin] != "{":
                return -1
            self._position, self._depth = begin + 1, 1
        for delimiter in _JSON_DELIMITERS.finditer(text, self._position):
            self._position = delimiter.end()
            if delimiter[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string and delimiter[0] in "{}":
                self._depth += 1 if delimiter[0] == "{" else -1
                if not self._depth:
                    return self._position
        return 0


_JSON_DELIMITERS = re.compile(r'\\.|["{}]', re.DOTALL)


def _parse_call(text: str, key: str, names: Collection[str]) -> ParsedCall | None:
    """Return the call that a text is."""
    return _to_call(_parse_strict_json(text), key, names)


def _to_call(value: Any, key: str, names: Collection[str]) -> ParsedCall | None:
    if not isinstance(value, dict) or not isinstance(value.get(key), dict):
        return None
    name = value.get("name")
    return ParsedCall(name, _dump_arguments(value[key])) if isinstance(name, str) and name in names else None


def _parse_strict_json(text: str) -> Any:
    """Return what a text of strict JSON holds; None: it is none."""
    try:
        return json_reader.require_shallow(json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_finite))
    except (ValueError, RecursionError):
        return None


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _parse_finite(number: str) -> float:
    value = float(number)
    if abs(value) == float("inf"):
        raise ValueError(f"{number} is too large")
    return value


def _dump_arguments(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(arguments)
