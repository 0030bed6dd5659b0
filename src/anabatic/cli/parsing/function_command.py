"""Commands from functions: parameters become options and arguments, the docstring becomes the help.

A keyword-only parameter is an option, a positional-only one or `*words` an argument, any other is both. The type
decides the kind of its value: `bool` is a switch, `tuple` or `list` an option that may be given several times.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.cli.parsing.command_line import (
    Argument,
    Command,
    Interface,
    Option,
    ParsedLine,
)

_METAVARS: dict[type, str] = {str: "STR", Path: "PATH"}
_PARAMETERS_HEADING = re.compile(r"\n *Parameters\n *-+\n")


@dataclass(frozen=True)
class OptionNames:
    """Annotation of a parameter whose option has other names than the parameter's.

    Attributes:
        names: as typed.
        takes_hyphens: a value, or an argument, may begin with a hyphen.
    """

    names: tuple[str, ...] = ()
    takes_hyphens: bool = False


@dataclass(frozen=True)
class _Parameter:
    name: str
    value_type: type
    kind: Any
    is_list: bool
    default: Any
    names: tuple[str, ...]
    takes_hyphens: bool

    @property
    def key(self) -> str:
        return self.name.strip("_")

    @property
    def is_argument(self) -> bool:
        return self.kind is not inspect.Parameter.KEYWORD_ONLY

    @property
    def is_option(self) -> bool:
        return self.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def make_function_command(function: Callable[..., Any]) -> Command:
    """Return the command that calls `function`.

    Raises:
        TypeError: a parameter is of a type that no option has.
    """
    parameters = list(_read_parameters(function))
    description, docs = _read_docstring(function)
    interface = Interface(
        description=description,
        options=tuple(_make_option(one, docs.get(one.name, "")) for one in parameters if one.is_option),
        arguments=tuple(_make_argument(one, docs.get(one.name, "")) for one in parameters if one.is_argument),
        takes_hyphens=any(one.takes_hyphens for one in parameters if one.is_argument),
    )

    def run(line: ParsedLine) -> Any:
        args, options = _bind_values(parameters, line)
        return function(*args, **options)

    return Command(interface, run)


def _read_parameters(function: Callable[..., Any]) -> Iterator[_Parameter]:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint, names = hints[name], OptionNames()
        if typing.get_origin(hint) is typing.Annotated:
            hint, names = typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hint = next(each for each in typing.get_args(hint) if each is not types.NoneType)
        is_list = typing.get_origin(hint) in (list, tuple)
        value_type = typing.get_args(hint)[0] if is_list else hint
        if value_type not in (str, bool, Path):
            raise TypeError(f"{function.__name__}: {name} is {value_type}")
        is_words = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        own_names = names.names or (f"--{name.strip('_').replace('_', '-')}",)
        yield _Parameter(
            name, value_type, parameter.kind, is_list or is_words, parameter.default, own_names, names.takes_hyphens
        )


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the paragraphs of a docstring, and parameter -> explanation of its numpy section `Parameters`."""
    text, *rest = _PARAMETERS_HEADING.split(f"{inspect.getdoc(function) or ''}\n", maxsplit=1)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    docs: dict[str, str] = {}
    name = ""
    for line in rest[0].splitlines() if rest else []:
        if line.startswith(" "):
            docs[name] = f"{docs[name]} {line.strip()}".strip()
        elif line.strip():
            name = line.strip()
            docs[name] = ""
    return "\n\n".join(paragraphs), docs


def _make_option(parameter: _Parameter, help_text: str) -> Option:
    default = parameter.default
    is_shown = default not in (None, "", False) and default is not inspect.Parameter.empty and not parameter.is_list
    return Option(
        key=parameter.key,
        names=parameter.names,
        help=help_text,
        metavar="" if parameter.value_type is bool else _METAVARS[parameter.value_type],
        is_repeatable=parameter.is_list,
        takes_hyphens=parameter.takes_hyphens,
        default=str(default) if is_shown else "",
    )


def _make_argument(parameter: _Parameter, help_text: str) -> Argument:
    is_words = parameter.kind is inspect.Parameter.VAR_POSITIONAL
    is_required = not is_words and parameter.default is inspect.Parameter.empty
    return Argument(parameter.name.upper(), help_text, is_required, is_words)


def _bind_values(parameters: list[_Parameter], line: ParsedLine) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and keyword arguments of a call."""
    args: list[Any] = []
    options: dict[str, Any] = {}
    words = list(line.words)
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args += [parameter.value_type(word) for word in words]
        elif parameter.is_argument and words:
            args.append(parameter.value_type(words.pop(0)))
        elif parameter.key in line.values:
            options[parameter.name] = _convert_value(parameter, line.values[parameter.key])
    return args, options


def _convert_value(parameter: _Parameter, value: Any) -> Any:
    if parameter.is_list:
        return tuple(parameter.value_type(each) for each in value)
    return parameter.value_type(value)
