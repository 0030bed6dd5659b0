"""Values against the type hints of the settings: nothing is rounded, guessed or skipped.

A value is either already typed (from YAML) or a `UntypedText`, as typed on the command line, which is read by the
type that the setting wants.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anabatic.config.loading.yaml_reader import KeyPath
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean


class UnknownSetting(ConfigError):
    """A key that the settings of a command do not have.

    Attributes:
        key: as it is written, with its sections.
        value: what was given.
        root: the dataclass of the command's settings.
    """

    def __init__(self, message: str, hint: str, key: str, value: Any, root: type) -> None:
        super().__init__(message, hint)
        self.key, self.value, self.root = key, value, root


class UntypedText(str):
    """A value from the command line or from a `${name}`: not typed yet."""


class SettingNamer:
    """Names a value in messages. This one is for a tree with dotted keys; `OptionNamer` is for the command line."""

    def __init__(self, prefix: Callable[[KeyPath], str] | str = "") -> None:
        self.prefix = (lambda path: prefix) if isinstance(prefix, str) else prefix

    def format_path(self, path: KeyPath) -> str:
        """`recipe.yaml:12: schedule.max_steps`"""
        return f"{self.prefix(path)}{dotted_key(path)}"

    def format_key(self, key: str) -> str:
        """How a setting with the dotted `key` is written here."""
        return key


class OptionNamer(SettingNamer):
    """Names a value by its option: `--schedule.max-steps`.

    Args:
        typed_names: dotted key -> the name that was typed, where an option has several: `--minutes`.
    """

    def __init__(self, typed_names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.typed_names = typed_names or {}

    def format_path(self, path: KeyPath) -> str:
        return self.format_key(dotted_key(path))

    def format_key(self, key: str) -> str:
        name, bracket, index = key.partition("[")
        return self.typed_names.get(name, "--" + name.replace("_", "-")) + bracket + index


def dotted_key(path: KeyPath) -> str:
    """`("data", "train", 0)` -> `data.train[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> type of a dataclass; sections stand behind the other settings, whichever class declares them."""
    resolved = typing.get_type_hints(cls)
    names = sorted((each.name for each in dataclasses.fields(cls)), key=lambda n: dataclasses.is_dataclass(resolved[n]))
    return {name: resolved[name] for name in names}


def iter_settings(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(dotted key, type)` of every setting that is not a section."""
    for name, hint in field_types(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from iter_settings(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def check_section(
    tree: Any, cls: type, where: SettingNamer, path: KeyPath = (), root: type | None = None
) -> dict[str, Any]:
    """Check the keys and values given for dataclass `cls`; return them with their final types.

    Args:
        tree: what was given, possibly only some of the fields.
        cls: the dataclass.
        where: names a value in messages.
        path: keys from the root to `tree`.
        root: the command's dataclass, searched when a key stands in the wrong section.

    Raises:
        ConfigError: an unknown key, a wrong type or a value that is not among the choices.
    """
    root = root or cls
    known = field_types(cls)
    if not isinstance(tree, dict):
        example = ", ".join(list(known)[:4])
        expected = f"a section (keys such as {example})"
        raise _wrong_type_error(tree, expected, where, path, "put its keys on indented lines below it")
    result = {}
    for key, value in tree.items():
        if key not in known:
            raise unknown_key_error(key, value, cls, where, path, root)
        hint = known[key]
        inner = (*path, key)
        if dataclasses.is_dataclass(hint):
            result[key] = check_section(value, typing.cast(type, hint), where, inner, root)
        else:
            result[key] = convert_value(value, hint, where, inner)
    return result


def unknown_key_error(
    key: str, value: Any, cls: type, where: SettingNamer, path: KeyPath, root: type
) -> UnknownSetting:
    """Return the error for a key that `cls` does not have, with the nearest one that exists."""
    known = list(field_types(cls))
    guess = did_you_mean(key, known)
    elsewhere = [name for name, _ in iter_settings(root) if name.split(".")[-1] == key]
    base = dotted_key(path)
    hint = f"{base or 'top level'} has: {', '.join(known)}"
    if not guess and elsewhere:
        hint = f"write it as {' or '.join(elsewhere)}"
    message = f"{where.format_path((*path, key))} is not a known setting.{guess}"
    return UnknownSetting(message, hint, dotted_key((*path, key)), value, root)


def convert_value(value: Any, hint: Any, where: SettingNamer, path: KeyPath) -> Any:
    """Return `value` as the type `hint` asks for.

    Raises:
        ConfigError: it is of another type.
    """
    if hint is Any:
        return value
    inner, optional = strip_optional(hint)
    if optional and (value is None or (isinstance(value, UntypedText) and value == "null")):
        return None
    if value is None:
        raise _wrong_type_error(
            value, describe_type(inner), where, path, "give a value, or leave it out for the default"
        )
    if dataclasses.is_dataclass(inner):
        return check_section(value, typing.cast(type, inner), where, path)
    kind = typing.get_origin(inner) or inner
    return _CONVERTERS[kind](value, inner, where, path)


def strip_optional(hint: Any) -> tuple[Any, bool]:
    """`int | None` -> `(int, True)`; other types -> `(type, False)`."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    assert len(members) == 1, f"a setting has one type, or that type and None; not {hint}"
    return members[0], True


def describe_type(hint: Any) -> str:
    """Return the words for a type: `a whole number`, `one of auto, npu`."""
    if dataclasses.is_dataclass(hint):
        return "a section"
    kind = typing.get_origin(hint) or hint
    if kind is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if kind is list:
        return f"a list of {_PLURAL_TYPE_WORDS.get(typing.get_args(hint)[0], 'values')}"
    return _TYPE_WORDS[kind]


_TYPE_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a section",
}
_PLURAL_TYPE_WORDS: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts"}


def format_value(value: Any) -> str:
    """Return a value as the user wrote it, shortened: text in quotes, the rest as YAML writes it."""
    if isinstance(value, str):
        text = value if len(value) <= 60 else value[:57] + "..."
        return '"' + text.replace("\n", "\\n") + '"'
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)[:60]


def _wrong_type_error(value: Any, expected: str, where: SettingNamer, path: KeyPath, hint: str) -> ConfigError:
    return ConfigError(f"{where.format_path(path)} is {format_value(value)}, expected {expected}", hint)


def _convert_int(value: Any, hint: Any, where: SettingNamer, path: KeyPath) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, UntypedText) and re.fullmatch(r"[-+]?[0-9][0-9_]{0,30}", value):
        return int(value.replace("_", ""))
    advice = "write a whole number in digits, such as 1000"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        advice = f"write {int(value)}"
    elif isinstance(value, str) and not isinstance(value, UntypedText) and value.isdigit():
        advice = f"remove the quotes: {value}"
    raise _wrong_type_error(value, "a whole number", where, path, advice)


_NUMBER_PATTERN = re.compile(r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


def _convert_float(value: Any, hint: Any, where: SettingNamer, path: KeyPath) -> float:
    typed = isinstance(value, (int, float)) and not isinstance(value, bool)
    written = isinstance(value, str) and _NUMBER_PATTERN.fullmatch(value) is not None
    if not (typed or written):
        raise _wrong_type_error(value, "a number", where, path, "write a number such as 0.1 or 3e-4")
    number = _to_float(value)
    if not math.isfinite(number):
        raise _wrong_type_error(value, "a finite number", where, path, "write a number such as 0.1 or 3e-4")
    return number


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _convert_bool(value: Any, hint: Any, where: SettingNamer, path: KeyPath) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, UntypedText) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _wrong_type_error(value, "true or false", where, path, "write true or false, without quotes")


def _convert_str(value: Any, hint: Any, where: SettingNamer, path: KeyPath) -> str:
    if isinstance(value, str):
        return str(value)
    advice = "give one value"
    if not isinstance(value, (list, dict)):
        advice = f'put it in quotes: "{format_value(value)}"'
    raise _wrong_type_error(value, "text", where, path, advice)


def _convert_literal(value: Any, hint: Any, where: SettingNamer, path: KeyPath) -> Any:
    choices = typing.get_args(hint)
    if isinstance(value, str) and str(value) in choices:
        return str(value)
    guess = did_you_mean(value, choices).strip() if isinstance(value, str) else ""
    raise _wrong_type_error(value, describe_type(hint), where, path, guess or f"choose from: {', '.join(choices)}")


def _convert_list(value: Any, hint: Any, where: SettingNamer, path: KeyPath) -> list[Any]:
    (item,) = typing.get_args(hint)
    if isinstance(value, UntypedText):
        value = [] if value == "[]" else [value]
    if isinstance(value, str) and item is str:
        value = [value]  # one is as good as several: `train: chats.jsonl`
    if not isinstance(value, list):
        raise _wrong_type_error(
            value, describe_type(hint), where, path, f"put it in brackets: [{_format_list_item(value)}]"
        )
    return [convert_value(one, item, where, (*path, index)) for index, one in enumerate(value)]


def _format_list_item(value: Any) -> str:
    return "..." if isinstance(value, dict) else format_value(value)


def _convert_dict(value: Any, hint: Any, where: SettingNamer, path: KeyPath) -> dict[str, Any]:
    arguments = typing.get_args(hint)
    item = arguments[1] if arguments else Any
    if isinstance(value, list) and value and all(isinstance(one, UntypedText) for one in value):
        value = _parse_pairs(value, where, path)
    if not isinstance(value, dict):
        raise _wrong_type_error(value, "a section", where, path, "put its keys on indented lines below it")
    return {key: convert_value(one, item, where, (*path, key)) for key, one in value.items()}


def _parse_pairs(words: list[Any], where: SettingNamer, path: KeyPath) -> dict[str, UntypedText]:
    """`NAME=VALUE` words of the command line as a section."""
    pairs: dict[str, UntypedText] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals:
            raise _wrong_type_error(
                word, "NAME=VALUE", where, path, f"for example {where.format_path(path)} NAME=VALUE"
            )
        pairs[name] = UntypedText(text)
    return pairs


_CONVERTERS: dict[Any, Callable[[Any, Any, SettingNamer, KeyPath], Any]] = {
    int: _convert_int,
    float: _convert_float,
    bool: _convert_bool,
    str: _convert_str,
    list: _convert_list,
    dict: _convert_dict,
    typing.Literal: _convert_literal,
}
