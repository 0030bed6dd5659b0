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

from anabatic.core import json_text
from anabatic.core.errors import AnabaticError
from anabatic.data.tokenizer import chat_text
from anabatic.infer.stream import overlap

Style = Literal["hermes", "llama3"]
VLLM_PARSERS: dict[Style, str] = {"hermes": "hermes", "llama3": "llama3_json"}
"""What vLLM calls the two (docs.vllm.ai, "Tool Calling")."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PROBE = "probe0name"


@dataclass(frozen=True)
class Call:
    """A tool, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Event:
    """A part of an answer.

    Attributes:
        raw: the part as it was written; all parts together are the answer.
        text: what is said of it.
        call: what it calls.
    """

    raw: str
    text: str = ""
    call: Call | None = None


class Reader(Protocol):
    """Takes an answer in pieces."""

    def push(self, piece: str) -> list[Event]:
        """Return the parts that have become certain."""

    def finish(self) -> list[Event]:
        """Return what is left: nothing more will come."""


def style(tokenizer: Any) -> Style | None:
    """Return how a chat template writes calls; None: in no way that is known, or not at all."""
    call = {"id": "call00000", "type": "function", "function": {"name": _PROBE, "arguments": {"a": 1}}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    text = _rendered(tokenizer, talk, None)
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    before, found, after = text.partition(OPEN)
    if found and OPEN not in special:
        inner, closed, _ = after.partition(CLOSE)
        return "hermes" if closed and _call(inner, "arguments", {_PROBE}) is not None else None
    start = text.find('{"name": "' + _PROBE)
    if start < 0:
        return None
    end = _Object().end(text, start)
    return "llama3" if end > 0 and _call(text[start:end], "parameters", {_PROBE}) is not None else None


def shows_tools(tokenizer: Any) -> bool:
    """True when a chat template tells the model of tools."""
    tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
    return _PROBE in _rendered(tokenizer, [{"role": "user", "content": "a"}], [tool])


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    try:
        return chat_text(tokenizer, messages, tools) if tokenizer.chat_template else ""
    except AnabaticError:
        return ""  # a template that refuses calls writes none


def reader(kind: Style, names: Collection[str], several: bool = True) -> Reader:
    """Return a reader of answers.

    Args:
        names: of the tools that may be called.
        several: more than one call is allowed; what comes behind the first one is text otherwise.
    """
    return _READERS[kind](names, several)


class Tagged:
    """Calls between tags, among other text. Blanks before a call belong to it."""

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        self._names, self._several = names, several
        self._held = ""
        self._object = _Object()
        self._calls = 0

    def push(self, piece: str) -> list[Event]:
        """Return the parts that have become certain."""
        self._held += piece
        return self._read(False)

    def finish(self) -> list[Event]:
        """Return what is left."""
        events = self._read(True)
        blank, self._held = self._held, ""
        if blank:
            events.append(Event(blank, "" if self._calls else blank))
        return events

    def _read(self, last: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            start = self._held.find(OPEN) if self._several or not self._calls else -1
            if start < 0:
                kept = 0 if last else overlap(self._held, OPEN)
                self._say(events, len(self._held[: len(self._held) - kept].rstrip()))
                return events
            self._say(events, len(self._held[:start].rstrip()))
            start = self._held.find(OPEN)
            end = self._end(start + len(OPEN), last)
            if end == 0:
                return events
            text = self._held[start + len(OPEN) : end].removesuffix(CLOSE)
            call = _call(text, "arguments", self._names) if end > 0 else None
            self._object = _Object()
            if call is None:
                self._say(events, start + len(OPEN))
                continue
            events.append(Event(self._held[:end], call=call))
            self._held = self._held[end:]
            self._calls += 1

    def _end(self, start: int, last: bool) -> int:
        """Return where the call ends that begins at `start`; 0: further text decides; -1: it is none."""
        end = self._object.end(self._held, start)
        if end > 0:
            rest = self._held[end:].lstrip()
            if rest.startswith(CLOSE):
                return len(self._held) - len(rest) + len(CLOSE)
            end = 0 if CLOSE.startswith(rest) else -1
        return -1 if last else end

    def _say(self, events: list[Event], count: int) -> None:
        if count > 0:
            said, self._held = self._held[:count], self._held[count:]
            self._object.moved(count)
            events.append(Event(said, said))


class Bare:
    """An answer that is nothing but calls, divided by semicolons."""

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        self._names, self._several = names, several
        self._held = ""
        self._object = _Object()
        self._calls = 0
        self._text = False

    def push(self, piece: str) -> list[Event]:
        """Return the parts that have become certain."""
        self._held += piece
        return self._read()

    def finish(self) -> list[Event]:
        """Return what is left."""
        events = self._read()
        rest, self._held = self._held, ""
        if rest:
            events.append(Event(rest, "" if self._calls and not rest.strip(" \t\r\n;") else rest))
        return events

    def _read(self) -> list[Event]:
        events: list[Event] = []
        while not self._text:
            start = self._start()
            end = self._object.end(self._held, start) if start >= 0 else -1
            if end == 0:
                return events
            call = _call(self._held[start:end], "parameters", self._names) if end > 0 else None
            if call is None or (self._calls and not self._several):
                self._text = True
                break
            events.append(Event(self._held[:end], call=call))
            self._held, self._object = self._held[end:], _Object()
            self._calls += 1
        if self._held:
            events.append(Event(self._held, self._held))
            self._held = ""
        return events

    def _start(self) -> int:
        """Return where the next call may begin; -1: none does."""
        found = _BETWEEN.match(self._held) if self._calls else _BEFORE.match(self._held)
        return found.end() if found else -1


_BEFORE = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*;?\s*$|\s*;\s*(?=\{)")
_READERS: dict[Style, Callable[[Collection[str], bool], Reader]] = {"hermes": Tagged, "llama3": Bare}


class Forced:
    """An answer whose form was prescribed: the arguments of one tool, or a list of calls, each certain when it ends."""

    def __init__(self, names: Collection[str], named: str | None) -> None:
        self._names, self._named = names, named
        self._held = ""
        self._object = _Object()
        self._calls = 0
        self._text = False

    def push(self, piece: str) -> list[Event]:
        """Return the calls that have ended; the arguments of one tool are JSON only as a whole."""
        self._held += piece
        return [] if self._named is not None else self._read()

    def finish(self) -> list[Event]:
        """Return what is left. A call that was cut is given up where others are whole, and stays text otherwise."""
        rest, self._held = self._held, ""
        if not rest:
            return []
        if self._named is not None and isinstance(value := _json(rest), dict):
            return [Event(rest, call=Call(self._named, _dump(value)))]
        return [Event(rest, "" if self._calls and not self._text else rest)]

    def _read(self) -> list[Event]:
        events: list[Event] = []
        while not self._text and (found := (_NEXT if self._calls else _FIRST).match(self._held)):
            end = self._object.end(self._held, found.end())
            if end == 0:
                break
            call = _call(self._held[found.end() : end], "parameters", self._names)
            if call is None:
                self._text = True
                break
            events.append(Event(self._held[:end], call=call))
            self._held, self._object = self._held[end:], _Object()
            self._calls += 1
        return events


_FIRST = re.compile(r"\s*\[\s*(?=\{)")
_NEXT = re.compile(r"\s*,\s*(?=\{)")
MOST_CALLS = 32
"""In one answer that must call: a small model repeats itself until its answer is cut."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""OpenAI: a function whose parameters are left out has none."""


def schema(tools: list[dict[str, Any]], named: str | None, several: bool = True) -> dict[str, Any]:
    """Return the JSON schema of an answer that must call: the arguments of the tool `named`, or a list of calls.

    Args:
        tools: as in a request, at least one.
    """
    functions = [tool["function"] for tool in tools]
    arguments = {one["name"]: one.get("parameters") or _NO_PARAMETERS for one in functions}
    if named is not None:
        return dict(arguments[named])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": one},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, one in arguments.items()
    ]
    most = MOST_CALLS if several else 1
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}


class _Object:
    """Finds the end of a JSON object whose text is not whole yet, each sign looked at once."""

    def __init__(self) -> None:
        self._at, self._depth, self._quoted = 0, 0, False

    def moved(self, count: int) -> None:
        """The text has lost so many characters at its beginning."""
        self._at = max(0, self._at - count)

    def end(self, text: str, start: int) -> int:
        """Return where the object ends that begins behind `start` and blanks; 0: not yet; -1: there is none."""
        if not self._depth:
            begin = len(text) - len(text[start:].lstrip())
            if begin == len(text):
                return 0
            if text[begin] != "{":
                return -1
            self._at, self._depth = begin + 1, 1
        for sign in _SIGNS.finditer(text, self._at):
            self._at = sign.end()
            if sign[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted and sign[0] in "{}":
                self._depth += 1 if sign[0] == "{" else -1
                if not self._depth:
                    return self._at
        return 0


_SIGNS = re.compile(r'\\.|["{}]', re.DOTALL)


def _call(text: str, key: str, names: Collection[str]) -> Call | None:
    """Return the call that a text is."""
    return _called(_json(text), key, names)


def _called(value: Any, key: str, names: Collection[str]) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get(key), dict):
        return None
    name = value.get("name")
    return Call(name, _dump(value[key])) if isinstance(name, str) and name in names else None


def _json(text: str) -> Any:
    """Return what a text of strict JSON holds; None: it is none."""
    try:
        return json_text.require_shallow(json.loads(text, parse_constant=_refuse, parse_float=_finite))
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    if abs(value) == float("inf"):
        raise ValueError(f"{number} is too large")
    return value


def _dump(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(arguments)
