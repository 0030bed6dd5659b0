"""Split the words of a command line into options and words, as a command declares them.

Options may stand before, between and behind words; `--` ends them. A list takes the words up to the next option.
Values stay text: `config.loading.validation` converts them, as strictly as those of recipes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SEPARATOR = "--"
OTHER_COMMAND = "COMMAND"
"""Name of the argument that is another command, which stands after `--`."""
_NUMBER = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?|-(inf|nan)")
"""A negative number is a value, not an option."""
SWITCH_VALUES = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        key: name of its value.
        names: as typed, the first is the usual one.
        help: one paragraph.
        group: heading of the help page.
        metavar: kind of its value; empty: a switch.
        is_list: takes the values up to the next option; otherwise one.
        is_repeatable: may be given several times.
        takes_hyphens: a value may begin with a hyphen.
        off_names: names that turn a switch off.
        choices: values that are allowed.
        default: shown in the help.
        is_hidden: the help does not list it.
    """

    key: str
    names: tuple[str, ...]
    help: str = ""
    group: str = "Options"
    metavar: str = ""
    is_list: bool = False
    is_repeatable: bool = False
    takes_hyphens: bool = False
    off_names: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    default: str = ""
    is_hidden: bool = False


@dataclass(frozen=True)
class Argument:
    """An argument without a name.

    Attributes:
        name: in capitals, as the help shows it.
        help: one paragraph.
        is_required: the command does not run without it.
        is_list: takes all that follow.
        group: heading of the help page.
    """

    name: str
    help: str = ""
    is_required: bool = False
    is_list: bool = False
    group: str = "Arguments"


@dataclass(frozen=True)
class Interface:
    """What a command accepts.

    Attributes:
        description: paragraphs under the usage line.
        options: in the order of the help.
        arguments: in order; only the last may be a list.
        group_help: group -> sentence under its heading.
        takes_hyphens: unknown options are arguments.
    """

    description: str = ""
    options: tuple[Option, ...] = ()
    arguments: tuple[Argument, ...] = ()
    group_help: dict[str, str] = field(default_factory=dict)
    takes_hyphens: bool = False

    @property
    def takes_command(self) -> bool:
        """Another command and its options stand after `--`."""
        return any(argument.name == OTHER_COMMAND for argument in self.arguments)

    @property
    def option_names(self) -> list[str]:
        """All names of options."""
        return [name for option in self.options for name in (*option.names, *option.off_names)]


@dataclass(frozen=True)
class ParsedLine:
    """What was typed for a command.

    Attributes:
        values: key of an option -> text; list of texts; True or False for a switch.
        words: arguments without a name.
        typed_names: key of an option -> its name as it was typed, without those that turn a switch off.
    """

    values: dict[str, Any]
    words: tuple[str, ...]
    typed_names: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A command: what it accepts, and the function that runs it and returns its exit code."""

    interface: Interface
    run: Callable[[ParsedLine], Any]


class UsageError(Exception):
    """A command line that its command does not accept.

    Attributes:
        command: name of the command, set by the caller of `parse_tokens`; empty: the program itself.
        interface: what the command accepts.
    """

    command = ""
    interface = Interface()


class UnknownCommandError(UsageError):
    """There is no such command: `word`; `known` are those that exist."""

    def __init__(self, word: str, known: Sequence[str]) -> None:
        super().__init__(f"unknown command: {word}")
        self.word = word
        self.known = list(known)


class UnknownOptionError(UsageError):
    """The command has no such option: `option`, without its value."""

    def __init__(self, option: str) -> None:
        super().__init__(f"unknown option: {option}")
        self.option = option


class UnusedWordsError(UsageError):
    """The command takes no such words."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(f"unused words: {' '.join(words)}")
        self.words = list(words)


class MissingValueError(UsageError):
    """`name`, an option or an argument, has no value."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no value: {name}")
        self.name = name


class RepeatedOptionError(UsageError):
    """`option` is given twice, at first by the name `earlier`."""

    def __init__(self, option: str, earlier: str) -> None:
        super().__init__(f"given twice: {option}")
        self.option, self.earlier = option, earlier


class SwitchValueError(UsageError):
    """`option` is a switch and has another value than true or false."""

    def __init__(self, option: str, value: str) -> None:
        super().__init__(f"not true or false: {option}={value}")
        self.option = option
        self.value = value


def is_option(token: str) -> bool:
    """Return whether a token has the form of an option: a hyphen in front, and no negative number."""
    return len(token) > 1 and token.startswith("-") and _NUMBER.fullmatch(token) is None


def split_at_separator(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the tokens before `--`, and those from it on."""
    at = tokens.index(SEPARATOR) if SEPARATOR in tokens else len(tokens)
    return list(tokens[:at]), list(tokens[at:])


def parse_tokens(tokens: Sequence[str], interface: Interface) -> ParsedLine:
    """Split what was typed behind the name of a command.

    Raises:
        UsageError: an option is unknown, given twice or without a value, or there are too many or too few arguments.
    """
    parser = _Parser(tokens, interface)
    try:
        return parser.parse()
    except UsageError as error:
        error.interface = interface
        raise


class _Parser:
    def __init__(self, tokens: Sequence[str], interface: Interface) -> None:
        own, rest = split_at_separator(tokens)
        self.tokens, self.behind_separator = own, rest[1:]
        self.interface = interface
        self.options = {name: option for option in interface.options for name in (*option.names, *option.off_names)}
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.words: list[str] = []
        self.unknown: list[str] = []

    def parse(self) -> ParsedLine:
        while self.tokens:
            token = self.tokens.pop(0)
            if not is_option(token):
                self.words.append(token)
            elif (found := self._find_option(token)) is not None:
                self._read_option(*found)
            elif self.interface.takes_hyphens:
                self.words.append(token)
            else:
                self.unknown.append(token.partition("=")[0])
        if self.unknown:
            raise UnknownOptionError(self.unknown[0])
        words = [*self.words, *self.behind_separator]
        self._check_arguments(words)
        names = {key: name for key, name in self.names.items() if name not in self.options[name].off_names}
        return ParsedLine(self.values, tuple(words), names)

    def _find_option(self, token: str) -> tuple[str, Option, str | None] | None:
        """Return the name, the option and the value behind `=` of a token; `_` in a name is the same as `-`."""
        name, equals, value = token.partition("=")
        if not name.startswith("--"):
            if name[:2] in self.options and len(name) > 2 and not token[2].isalpha():  # -n8, but not -config
                return name[:2], self.options[name[:2]], token[2:]
        elif name not in self.options:
            name = name.replace("_", "-")
        option = self.options.get(name)
        return None if option is None else (name, option, value if equals else None)

    def _read_option(self, name: str, option: Option, value: str | None) -> None:
        if option.key in self.values and not (option.is_list or option.is_repeatable):
            raise RepeatedOptionError(name, self.names[option.key])
        self.names[option.key] = name
        if not option.metavar:
            self.values[option.key] = self._read_switch(name, option, value)
            return
        given = [value] if value is not None else self._take_values(option)
        if not given:
            raise MissingValueError(name)
        if option.is_list or option.is_repeatable:
            self.values.setdefault(option.key, []).extend(given)
        else:
            self.values[option.key] = given[0]

    @staticmethod
    def _read_switch(name: str, option: Option, value: str | None) -> bool:
        if value is not None and value.lower() not in SWITCH_VALUES:
            raise SwitchValueError(name, value)
        is_on = value is None or SWITCH_VALUES[value.lower()]
        return is_on != (name in option.off_names)

    def _take_values(self, option: Option) -> list[str]:
        taken: list[str] = []
        while self.tokens and (option.is_list or not taken):
            if is_option(self.tokens[0]) and not option.takes_hyphens:
                break
            taken.append(self.tokens.pop(0))
        return taken

    def _check_arguments(self, words: list[str]) -> None:
        arguments = self.interface.arguments
        takes_all = bool(arguments) and arguments[-1].is_list
        if len(words) > len(arguments) and not takes_all:
            raise UnusedWordsError(words[len(arguments) :])
        missing = [one for one in arguments[len(words) :] if one.is_required]
        if missing:
            raise MissingValueError(missing[0].name)
