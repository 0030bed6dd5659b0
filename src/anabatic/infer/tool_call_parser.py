"""Tool calls in the text of a model, found while it arrives, at whatever place it is cut.

Two formats are known. Hermes and Qwen (from 2.5): `<tool_call>` JSON with `name` and `arguments` `</tool_call>`, among
other text. Llama 3: the answer is JSON with `name` and `parameters`, several separated by semicolons (Meta's "Model
Cards & Prompt formats", Llama 3.1 and 3.2). The chat template shows which one a model was taught. A call begins once
the name of an offered tool is known; what never gets that far stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol

from anabatic.core import json_reader
from anabatic.core.errors import AnabaticError
from anabatic.data.tokenizer.hf_folder import render_chat
from anabatic.infer.text_stream import measure_overlap
from anabatic.infer.tool_call_reader import CallReader, JsonValueScanner, ParsedSegment, skip_blanks

ToolCallStyle = Literal["hermes", "llama3"]
VLLM_PARSERS: dict[ToolCallStyle, str] = {"hermes": "hermes", "llama3": "llama3_json"}
"""Names of the two in vLLM (docs.vllm.ai, "Tool Calling")."""
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_PROBE_NAME = "probe0name"


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
    if CALL_OPEN in text and CALL_OPEN not in special:
        return "hermes" if CALL_CLOSE in text and _finds_probe(HermesParser([_PROBE_NAME]), text) else None
    start = text.find('{"name": "' + _PROBE_NAME)
    return "llama3" if start >= 0 and _finds_probe(make_parser("llama3", [_PROBE_NAME]), text[start:]) else None


def _finds_probe(parser: ToolCallParser, text: str) -> bool:
    """True when a parser finds the call of the probe, with its arguments."""
    segments = parser.push_text(text)
    found = [at for at, segment in enumerate(segments) if segment.name is not None]
    if not found:
        return False
    try:
        return isinstance(json_reader.loads("".join(segment.arguments for segment in segments[found[0] :])), dict)
    except ValueError:
        return False


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
    """Return a parser of answers.

    Args:
        names: names of the offered tools.
        several: more than one call is allowed; otherwise, what follows the first one is text.
    """
    return _PARSERS[kind](names, several)


def make_forced_parser(names: Collection[str], tool_name: str | None) -> ToolCallParser:
    """Return a parser of answers whose form was prescribed by `build_call_schema`.

    Args:
        names: names of the offered tools.
        tool_name: the answer is the arguments of this tool; None: a list of calls.
    """
    return _CallListParser(names, True, ",", True) if tool_name is None else _ArgumentsParser(tool_name)


class _CallParser:
    """Common part of the parsers: the call that is being read, and the text that is held until it is decided."""

    def __init__(self, names: Collection[str], several: bool) -> None:
        self._names, self._allows_several = names, several
        self._held: list[str] = []
        self._reader: CallReader | None = None
        self._num_calls = 0

    def _allows_call(self) -> bool:
        return self._allows_several or not self._num_calls

    def _read_call(self, events: list[ParsedSegment], reader: CallReader, text: str, at: int) -> int:
        """Continue a call at `text[at]`; return the index after the part that was used."""
        is_new = reader.name is None
        end = reader.read(text, at)
        if end == at and reader.outcome is None:
            return end
        self._held.append(text[at:end])
        if reader.name is not None:
            self._num_calls += is_new
            events.append(reader.take_segment("".join(self._held)))
            self._held = []
        if reader.outcome is not None:
            self._reader = None
        return end


class HermesParser(_CallParser):
    """Calls between tags, among other text. Blanks before a call belong to it."""

    def __init__(self, names: Collection[str], several: bool = True) -> None:
        super().__init__(names, several)
        self._rest = ""  # shorter than a tag

    def push_text(self, piece: str) -> list[ParsedSegment]:
        """Return the parts that have become certain."""
        return self._parse(piece, False)

    def flush(self) -> list[ParsedSegment]:
        """Return what is left."""
        events = self._parse("", True)
        raw, self._rest, self._held = "".join(self._held) + self._rest, "", []
        if raw and self._reader is not None and self._reader.name is not None:
            events.append(ParsedSegment(raw))  # the beginning of a closing tag
        elif raw:
            events.append(ParsedSegment(raw, "" if self._num_calls and not raw.strip() else raw))
        self._reader = None
        return events

    def _parse(self, piece: str, last: bool) -> list[ParsedSegment]:
        text, at, reader = self._rest + piece, 0, self._reader
        events: list[ParsedSegment] = []
        while at < len(text):
            if reader is None:
                end = self._read_text(events, text, at, last)
            else:
                end = self._read_call(events, reader, text, at)
                if reader.outcome == "failed":
                    self._emit_held(events, "")
            if end == at and reader is self._reader:
                break
            at, reader = end, self._reader
        self._rest = text[at:]
        return events

    def _read_text(self, events: list[ParsedSegment], text: str, at: int, last: bool) -> int:
        start = text.find(CALL_OPEN, at) if self._allows_call() else -1
        end = start if start >= 0 else len(text) - (0 if last else measure_overlap(text[at:], CALL_OPEN))
        if text[at:end].strip():
            self._emit_held(events, text[at:end])
        else:
            self._held.append(text[at:end])
        if start < 0:
            return end
        self._held.append(CALL_OPEN)
        self._reader = CallReader(self._names, CALL_CLOSE)
        return start + len(CALL_OPEN)

    def _emit_held(self, events: list[ParsedSegment], more: str) -> None:
        """Emit the text that is held and `more`, except the blanks at the end."""
        whole = "".join(self._held) + more
        sure = whole.rstrip()
        self._held = [whole[len(sure) :]]
        events.append(ParsedSegment(sure, sure))


class _CallListParser(_CallParser):
    """An answer that is nothing but calls with a sign between them. Other text makes the rest of the answer text.

    Args:
        separator: the sign.
        is_enclosed: the calls are between square brackets.
    """

    def __init__(self, names: Collection[str], several: bool, separator: str, is_enclosed: bool) -> None:
        super().__init__(names, several)
        self._is_enclosed = is_enclosed
        self._next = {"open": {"[": "call"}, "between": {separator: "call"} | ({"]": "end"} if is_enclosed else {})}
        self._expected = "open" if is_enclosed else "call"
        self._is_plain_text = False

    def push_text(self, piece: str) -> list[ParsedSegment]:
        """Return the parts that have become certain."""
        events: list[ParsedSegment] = []
        at = 0
        while at < len(piece) and not self._is_plain_text:
            if (reader := self._reader) is None:
                at = self._read_between(piece, at)
                continue
            at = self._read_call(events, reader, piece, at)
            self._expected, self._is_plain_text = "between", reader.outcome == "failed"
        if self._is_plain_text and (raw := "".join(self._held) + piece[at:]):
            self._held = []
            events.append(ParsedSegment(raw, raw))
        return events

    def flush(self) -> list[ParsedSegment]:
        """Return what is left. In a list, the beginning of another call is dropped; otherwise it is text."""
        raw, self._held = "".join(self._held), []
        is_dropped = self._num_calls > 0 and (self._is_enclosed or self._reader is None)
        return [ParsedSegment(raw, "" if is_dropped else raw)] if raw else []

    def _read_between(self, text: str, at: int) -> int:
        start = skip_blanks(text, at)
        self._held.append(text[at:start])
        if start == len(text):
            return start
        if self._expected == "call" and text[start] == "{" and self._allows_call():
            self._reader = CallReader(self._names)
        elif (expected := self._next.get(self._expected, {}).get(text[start])) is not None:
            self._expected = expected
            self._held.append(text[start])
            return start + 1
        else:
            self._is_plain_text = True
        return start


class _ArgumentsParser:
    """An answer that is the arguments of one tool."""

    def __init__(self, tool_name: str) -> None:
        self._tool_name = tool_name
        self._held: list[str] = []
        self._scanner: JsonValueScanner | None = None
        self._is_plain_text = False

    def push_text(self, piece: str) -> list[ParsedSegment]:
        """Return the parts that have become certain."""
        events: list[ParsedSegment] = []
        at = 0
        if self._scanner is None and not self._is_plain_text:
            at = skip_blanks(piece, 0)
            self._held.append(piece[:at])
            self._is_plain_text = at < len(piece) and piece[at] != "{"
        if at < len(piece) and not self._is_plain_text:
            at = self._read_arguments(events, piece, at)
        if self._is_plain_text and (raw := "".join(self._held) + piece[at:]):
            self._held = []
            events.append(ParsedSegment(raw, raw))
        return events

    def _read_arguments(self, events: list[ParsedSegment], piece: str, at: int) -> int:
        name = self._tool_name if self._scanner is None else None
        scanner = self._scanner = self._scanner or JsonValueScanner(has_tags=False)
        if not scanner.is_complete:
            end = scanner.scan(piece, at)
            raw, self._held = "".join(self._held) + piece[at:end], []
            events.append(ParsedSegment(raw, name=name, arguments=piece[at:end], ends_call=scanner.is_complete))
            at = end
        start = skip_blanks(piece, at)
        self._held.append(piece[at:start])
        self._is_plain_text = start < len(piece)
        return start

    def flush(self) -> list[ParsedSegment]:
        """Return the blanks that are left."""
        raw, self._held = "".join(self._held), []
        return [ParsedSegment(raw, "" if self._scanner is not None else raw)] if raw else []


_PARSERS: dict[ToolCallStyle, Callable[[Collection[str], bool], ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": lambda names, several: _CallListParser(names, several, ";", False),
}
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
