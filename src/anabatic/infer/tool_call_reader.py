"""One tool call, written as a JSON object, read while its text arrives.

Every character is examined once, so the cost of a call is linear in its length, however it is cut into pieces. The text
of the arguments is passed on as the model wrote it, as OpenAI does ("the model does not always generate valid JSON",
platform.openai.com/docs/api-reference/chat/object).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from anabatic.core import json_reader

_BLANKS = re.compile(r"\s*")
_STRUCTURE, _STRUCTURE_AND_TAGS = re.compile(r'["{}\[\]]'), re.compile(r'["{}\[\]<]')
_STRING, _STRING_AND_TAGS = re.compile(r'["\\\x00-\x1f]'), re.compile(r'["\\<]')
_SCALAR_END = re.compile(r"[\s,}\]<]")


@dataclass(frozen=True)
class ParsedSegment:
    """A part of an answer.

    Attributes:
        raw: the part as the model wrote it; all parts together are the answer.
        text: content of the message.
        name: tool whose call begins here.
        arguments: a piece of the arguments of the call that is open.
        ends_call: the arguments of the open call are complete. A call that the answer's end cuts off has no such part.
    """

    raw: str
    text: str = ""
    name: str | None = None
    arguments: str = ""
    ends_call: bool = False


class JsonValueScanner:
    """Finds the end of a JSON value whose text comes in pieces: brackets are counted, strings are skipped.

    Args:
        has_tags: a tag may follow: stop at each `<` outside of strings, or in a string with a control character.
        is_strict: stop at a control character in a string, which JSON forbids.

    Attributes:
        is_complete: the end was found.
    """

    def __init__(self, has_tags: bool, is_strict: bool = False) -> None:
        self.is_complete = self._is_malformed = False
        self._has_tags, self._is_strict = has_tags, is_strict
        self._is_started = self._is_scalar = self._is_in_string = self._is_escaped = False
        self._depth = 0

    def scan(self, text: str, at: int) -> int:
        """Continue at `text[at]`; return the index after the part that belongs to the value.

        The index is before the end of `text` if the value is complete or the scanner stops, see above.
        """
        if not self._is_started:
            self._is_started, self._is_scalar = True, text[at] not in '{["'
        if self._is_scalar:
            found = _SCALAR_END.search(text, at)
            self.is_complete = found is not None
            return found.start() if found else len(text)
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = self._choose_pattern().search(text, at)
            if found is None:
                return len(text)
            if self._stops_at(found[0]):
                return found.start()
            at = found.end()
            if self.is_complete:
                break
        return at

    def _choose_pattern(self) -> re.Pattern[str]:
        if not self._is_in_string:
            return _STRUCTURE_AND_TAGS if self._has_tags else _STRUCTURE
        return _STRING_AND_TAGS if self._has_tags and self._is_malformed else _STRING

    def _stops_at(self, sign: str) -> bool:
        """Take a delimiter; return True for one that is not passed."""
        if sign == "<":
            return True
        if sign == '"':
            self._is_in_string = not self._is_in_string
            self.is_complete = not self._is_in_string and not self._depth
        elif sign == "\\":
            self._is_escaped = True
        elif sign in "{}[]":
            self._depth += 1 if sign in "{[" else -1
            self.is_complete = not self._depth
        else:
            self._is_malformed = True
            return self._is_strict
        return False


_PUNCTUATION: dict[str, dict[str, str]] = {
    "open": {"{": "first key"},
    "first key": {'"': "key", "}": "close"},
    "next key": {'"': "key"},
    "colon": {":": "value"},
    "comma": {",": "next key", "}": "close"},
    "close": {},
}
"""Tokens that may come next in an object, and the state after them."""
_ARGUMENTS_KEYS = ("arguments", "parameters")
_Part = Literal["key", "name", "arguments", "other"]


class CallReader:
    """Reads the object of one call: a tool's name, its arguments and perhaps other keys, in any order.

    The call is certain once the name is known and is the name of a tool. The arguments then come piece by piece. What
    follows them, the rest of the object and the closing tag, is only passed. Of a repeated key, the first counts. The
    key of the arguments is `arguments` or `parameters`; an object without one has the arguments `{}`.

    Args:
        names: names of the tools.
        closing: tag after the object; empty: none.

    Attributes:
        name: name of the tool, once it is known.
        outcome: None while more text is needed; "failed": this is not a call; "ended": it is over.
    """

    def __init__(self, names: Collection[str], closing: str = "") -> None:
        self._names, self._closing = names, closing
        self.name: str | None = None
        self.outcome: Literal["failed", "ended"] | None = None
        self._expected = "open"
        self._key = ""
        self._scanner: JsonValueScanner | None = None
        self._part: _Part = "other"
        self._string: list[str] = []
        self._arguments: list[str] = []
        self._has_arguments = self._are_arguments_complete = False
        self._is_begin_taken = self._is_end_taken = False

    def read(self, text: str, at: int) -> int:
        """Continue at `text[at]`; return the index after the part that was used.

        Text that was not used is given again, together with what follows, unless there is an outcome.
        """
        while at < len(text) and self.outcome is None:
            end = self._read_value(text, at) if self._scanner is not None else self._read_punctuation(text, at)
            if end == at:
                break
            at = end
        return at

    def take_segment(self, raw: str) -> ParsedSegment:
        """Return what is new of a call whose name is known.

        Args:
            raw: text of the answer since the last segment.
        """
        name = None if self._is_begin_taken else self.name
        ends = self._are_arguments_complete and not self._is_end_taken
        pieces, self._arguments = self._arguments, []
        self._is_begin_taken, self._is_end_taken = True, self._is_end_taken or ends
        return ParsedSegment(raw, name=name, arguments="".join(pieces), ends_call=ends)

    def _read_punctuation(self, text: str, at: int) -> int:
        at = skip_blanks(text, at)
        if at == len(text):
            return at
        if self._expected == "value":
            return self._begin_value(text, at)
        expected = _PUNCTUATION[self._expected].get(text[at])
        if expected == "key":
            return self._begin_scan("key", text, at)
        if expected is None:
            return self._read_closing(text, at)
        self._expected = expected
        if expected == "close":
            self._end_object()
        return at + 1

    def _begin_value(self, text: str, at: int) -> int:
        first = text[at]
        if first in ",:}]<" or (self._key == "name" and self.name is None and first != '"'):
            return self._read_closing(text, at)
        part: _Part = "other"
        if self._key == "name" and self.name is None:
            part = "name"
        elif self._key in _ARGUMENTS_KEYS and not self._has_arguments:
            part, self._has_arguments = "arguments", True
        return self._begin_scan(part, text, at)

    def _begin_scan(self, part: _Part, text: str, at: int) -> int:
        self._part, self._string = part, []
        self._scanner = JsonValueScanner(bool(self._closing), part in ("key", "name"))
        return self._read_value(text, at)

    def _read_value(self, text: str, at: int) -> int:
        assert self._scanner is not None
        end = self._scanner.scan(text, at)
        self._keep(text[at:end])
        if self._scanner.is_complete:
            self._end_value()
        elif end < len(text):
            return self._pass_stop(text, end)
        return end

    def _pass_stop(self, text: str, at: int) -> int:
        """The scanner stopped at `text[at]`: only a `<` that begins no closing tag is part of the value."""
        if text[at] != "<" or text.startswith(self._closing, at):
            return self._read_closing(text, at)
        if self._may_close(text, at):
            return at
        self._keep("<")
        return at + 1

    def _keep(self, piece: str) -> None:
        if self._part in ("key", "name"):
            self._string.append(piece)
        elif self._part == "arguments":
            self._arguments.append(piece)

    def _end_value(self) -> None:
        self._scanner = None
        self._expected = "colon" if self._part == "key" else "comma"
        if self._part == "arguments":
            self._are_arguments_complete = True
        elif self._part in ("key", "name"):
            self._end_string("".join(self._string))

    def _end_string(self, text: str) -> None:
        try:
            value = str(json_reader.loads(text))
        except ValueError:  # an escape that JSON does not have
            self._break_off()
            return
        if self._part == "key":
            self._key = value
        elif value in self._names:
            self.name = value
        else:
            self._break_off()

    def _end_object(self) -> None:
        if self.name is not None and not self._has_arguments:
            self._arguments, self._has_arguments = ["{}"], True
        self._are_arguments_complete = True
        if self.name is None or not self._closing:
            self._break_off()

    def _read_closing(self, text: str, at: int) -> int:
        """Neither the object nor its values go on at `text[at]`: a closing tag is used, other text is not."""
        is_closed = bool(self._closing) and text.startswith(self._closing, at)
        if self.name is not None and not is_closed and self._may_close(text, at):
            return at
        self._break_off()
        return at + len(self._closing) if is_closed and self.name is not None else at

    def _may_close(self, text: str, at: int) -> bool:
        return len(text) - at < len(self._closing) and self._closing.startswith(text[at:])

    def _break_off(self) -> None:
        self.outcome = "failed" if self.name is None else "ended"
        self._are_arguments_complete = True


def skip_blanks(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is not blank."""
    found = _BLANKS.match(text, at)
    return found.end() if found else at
