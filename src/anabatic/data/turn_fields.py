"""What the fields of a turn and of a function's description must be: whatever else a template would print as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from anabatic.core import json_text

TEXTS = ("content", "reasoning_content", "reasoning", "name", "tool_call_id")
"""Fields of a turn that are text."""


class BadRow(Exception):
    """What is wrong with a row, without its place; `hint` where there is one of its own."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def check_turn(turn: Mapping[str, Any], index: int) -> None:
    """Make sure that the fields of a turn are what a chat template expects of them.

    Raises:
        BadRow: a text is something else, a call has no name, or its arguments are neither an object nor JSON text.
    """
    for key in TEXTS:
        if not isinstance(turn.get(key, ""), str):
            more = " or parts of text" if key == "content" else ""
            raise BadRow(f"message {index}: {key} is {kind_of(turn[key])}, not text{more}")
    calls = turn.get("tool_calls", [])
    if not isinstance(calls, list):
        raise BadRow(f"message {index}: tool_calls is {kind_of(calls)}, not a list")
    for number, call in enumerate(calls, start=1):
        _check_call(call, f"message {index}: call {number}")


def _check_call(call: Any, where: str) -> None:
    if not isinstance(call, dict):
        raise BadRow(f"{where} is {kind_of(call)}, not an object")
    identity = call.get("id")
    if isinstance(identity, bool) or not isinstance(identity, (str, int, type(None))):
        raise BadRow(f"{where}: id is {kind_of(identity)}, not text")
    _check_type(call, where)
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise BadRow(f"{where}: function is {kind_of(function)}, not an object")
    _check_name(function, where)
    arguments = function.get("arguments")
    if not (arguments is None or isinstance(arguments, (dict, str))):
        raise BadRow(f"{where}: arguments is {kind_of(arguments)}, not an object or JSON in a text")


def _check_type(value: Mapping[str, Any], where: str) -> None:
    kind = value.get("type")
    if not isinstance(kind, (str, type(None))):
        raise BadRow(f"{where}: type is {kind_of(kind)}, not text")


def check_tools(tools: Any) -> None:
    """Make sure that these are descriptions of functions, bare or as OpenAI wraps them.

    Raises:
        BadRow: they are no list of objects, or one has no name.
    """
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow('"tools" is not a list of function descriptions')
    for number, tool in enumerate(tools, start=1):
        _check_type(tool, f'"tools" {number}')
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            raise BadRow(f'"tools" {number}: function is {kind_of(function)}, not an object')
        _check_name(function, f'"tools" {number}')
        for key, kind in (("description", str), ("parameters", dict)):
            if not (function.get(key) is None or isinstance(function[key], kind)):
                wanted = "text" if kind is str else "an object"
                raise BadRow(f'"tools" {number}: {key} is {kind_of(function[key])}, not {wanted}')


def _check_name(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRow(f"{where}: name is {kind_of(name)}, not the name of a function")


def check_values(value: Any, where: str, depth: int = 0) -> None:
    """Make sure that no text at any depth has a lone surrogate, and that all numbers are ones that JSON has.

    Raises:
        BadRow: one has, one is not, or `value` is nested so deep that what comes behind could not walk through it.
    """
    if depth > json_text.MAX_DEPTH:
        raise BadRow(f"{where} is nested more than {json_text.MAX_DEPTH} deep")
    if isinstance(value, str):
        encodable(value, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"{where} has the number {value}, which JSON does not")
    elif isinstance(value, dict):
        for key, item in value.items():
            encodable(key, where)
            check_values(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_values(item, where, depth + 1)


def encodable(text: str, where: str) -> str:
    """Return `text`. JSON can spell half of a surrogate pair, which no UTF-8 text can hold.

    Raises:
        BadRow: it does.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(f"{where} has a lone surrogate at character {error.start}") from error
    return text


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    if isinstance(value, str):
        return "text" if value else "empty"
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"a number ({value})" if isinstance(value, (int, float)) else type(value).__name__)
