"""Check the fields and the order of turns, and the descriptions of tools, before a template prints them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from anabatic.core import json_reader
from anabatic.data.readers.document import Message

TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "name", "tool_call_id")
"""Fields of a turn that are text."""


class BadRowError(Exception):
    """Error in a row, without its position; `hint` where there is one of its own."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def check_turn(turn: Mapping[str, Any], index: int) -> None:
    """Make sure that the fields of a turn are what a chat template expects of them.

    Raises:
        BadRowError: a text is something else, a call has no name, or its arguments are neither an object nor JSON text.
    """
    for key in TEXT_FIELDS:
        if not isinstance(turn.get(key, ""), str):
            more = " or parts of text" if key == "content" else ""
            raise BadRowError(f"message {index}: {key} is {json_type_name(turn[key])}, not text{more}")
    calls = turn.get("tool_calls", [])
    if not isinstance(calls, list):
        raise BadRowError(f"message {index}: tool_calls is {json_type_name(calls)}, not a list")
    for number, call in enumerate(calls, start=1):
        _check_call(call, f"message {index}: call {number}")


def _check_call(call: Any, where: str) -> None:
    if not isinstance(call, dict):
        raise BadRowError(f"{where} is {json_type_name(call)}, not an object")
    identity = call.get("id")
    if isinstance(identity, bool) or not isinstance(identity, (str, int, type(None))):
        raise BadRowError(f"{where}: id is {json_type_name(identity)}, not text")
    _check_call_type(call, where)
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise BadRowError(f"{where}: function is {json_type_name(function)}, not an object")
    _check_name(function, where)
    arguments = function.get("arguments")
    if not (arguments is None or isinstance(arguments, (dict, str))):
        raise BadRowError(f"{where}: arguments is {json_type_name(arguments)}, not an object or JSON in a text")


def _check_call_type(value: Mapping[str, Any], where: str) -> None:
    kind = value.get("type")
    if not isinstance(kind, (str, type(None))):
        raise BadRowError(f"{where}: type is {json_type_name(kind)}, not text")


def check_tools(tools: Any) -> None:
    """Make sure that these are descriptions of functions, bare or as OpenAI wraps them.

    Raises:
        BadRowError: they are no list of objects, or one has no name.
    """
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError('"tools" is not a list of function descriptions')
    for number, tool in enumerate(tools, start=1):
        _check_call_type(tool, f'"tools" {number}')
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            raise BadRowError(f'"tools" {number}: function is {json_type_name(function)}, not an object')
        _check_name(function, f'"tools" {number}')
        for key, kind in (("description", str), ("parameters", dict)):
            if not (function.get(key) is None or isinstance(function[key], kind)):
                expected_type = "text" if kind is str else "an object"
                raise BadRowError(f'"tools" {number}: {key} is {json_type_name(function[key])}, not {expected_type}')


def _check_name(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRowError(f"{where}: name is {json_type_name(name)}, not the name of a function")


def check_json_values(value: Any, where: str, depth: int = 0) -> None:
    """Make sure that no text at any depth has a lone surrogate, and that all numbers are ones that JSON has.

    Raises:
        BadRowError: one has, one is not, or `value` is nested so deep that what comes behind could not walk through it.
    """
    if depth > json_reader.MAX_DEPTH:
        raise BadRowError(f"{where} is nested more than {json_reader.MAX_DEPTH} deep")
    if isinstance(value, str):
        require_encodable_text(value, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadRowError(f"{where} has the number {value}, which JSON does not")
    elif isinstance(value, dict):
        for key, item in value.items():
            require_encodable_text(key, where)
            check_json_values(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_json_values(item, where, depth + 1)


def require_encodable_text(text: str, where: str) -> str:
    """Return `text`. JSON can spell half of a surrogate pair, which no UTF-8 text can hold.

    Raises:
        BadRowError: it does.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError(f"{where} has a lone surrogate at character {error.start}") from error
    return text


def json_type_name(value: Any) -> str:
    """Return what a JSON value is, in words."""
    if isinstance(value, str):
        return "text" if value else "empty"
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"a number ({value})" if isinstance(value, (int, float)) else type(value).__name__)


_LEADING_ROLES = ("system", "developer")


def require_turn_order(turns: list[Message]) -> None:
    """Make sure that the turns can have been spoken in this order.

    System messages come first, the assistant does not speak before anybody else has, and a tool answers only the
    assistant or another tool. Two turns of one speaker in a row are fine: data sets contain them.

    Raises:
        BadRowError: names the first turn that cannot be where it is.
    """
    before = ""
    for number, turn in enumerate(turns, start=1):
        role = turn["role"]
        if role in _LEADING_ROLES and before not in ("", *_LEADING_ROLES):
            raise BadRowError(f"message {number} has the role {role!r}, but comes after the {before}'s")
        if role == "assistant" and before in ("", *_LEADING_ROLES):
            raise BadRowError(f"message {number} is the assistant's, but nobody has asked anything before")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRowError(f"message {number} is a tool's, but comes after the {before or 'beginning'}")
        before = role
