"""Parse a shell script into the commands it would run, with its arithmetic, as far as they are written out.

Quotes, escapes, comments, joined lines, here-documents, redirections, assignments, `export`, arrays and variables that
the script itself sets are followed (POSIX.1-2024, chapter 2, and Bash's arrays). Nothing is run: `$(...)` and variables
from outside stay as they are typed, and both sides of an `if` count.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from anabatic.core.errors import ConfigError

VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=")
_EXPANSION = re.compile(r"\$(?:\{([A-Za-z_]\w*)(\[[@*]\])?(?::?[-=]([^{}]*))?\}|([A-Za-z_]\w*))")
_KEYWORDS = frozenset(
    (
        "if",
        "then",
        "elif",
        "else",
        "fi",
        "for",
        "while",
        "until",
        "do",
        "done",
        "case",
        "esac",
        "select",
        "{",
        "}",
        "!",
        "time",
    )
)
_MAX_EXPANDED = 4_000_000
"""Characters of variables that are followed: their values can double with every line."""
_HEADS = frozenset(("for", "case", "select"))
"""Of a loop or a choice: what stands behind them is no command, and a loop's variable stays open."""
_DECLARATIONS = frozenset(["export", "declare", "typeset", "readonly", "local"])


@dataclass(frozen=True)
class SimpleCommand:
    """One command: its words, the variables it gets, and the line (from 1) on which it begins."""

    words: tuple[str, ...]
    variables: dict[str, str]
    line: int


@dataclass
class _OpenCommand:
    """The command that is being read."""

    line: int
    words: list[str] = field(default_factory=list)
    current: str | None = None

    def add_text(self, text: str) -> None:
        self.current = (self.current or "") + text

    def end_word(self) -> None:
        if self.current is not None:
            self.words.append(self.current)
        self.current = None

    def is_assignment(self) -> bool:
        """True inside the value of an assignment, which is never split at blanks."""
        before = self.words[1:] if self.words[:1] and self.words[0] in _DECLARATIONS else self.words
        plain = all(_ASSIGNMENT.match(word) for word in before)
        return plain and self.current is not None and _ASSIGNMENT.match(self.current) is not None


def parse_script(text: str) -> list[SimpleCommand]:
    """Return the commands of a script, or of a line as it is typed.

    Raises:
        ConfigError: a quote, bracket or here-document is never closed.
    """
    return _ShellParser(text.replace("\r\n", "\n")).read_commands()


class _ShellParser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.lines, self.counted = 1, 0
        self.expanded = 0
        """Characters of values that were put in place of variables."""
        self.variables: dict[str, list[str]] = {"HOME": ["~"]}
        self.exported: dict[str, str] = {}
        self.commands: list[SimpleCommand] = []
        self.open_command = _OpenCommand(1)
        self.in_array = False
        """Inside NAME=( ... ), where a new line is a blank."""
        self.heredoc_ends: list[str] = []
        """Words that end the here-documents whose text begins on the next line."""

    def current_line(self) -> int:
        """Return the line (from 1) of the place that is being read; it only moves forward."""
        self.lines += self.text.count("\n", self.counted, self.position)
        self.counted = max(self.position, self.counted)
        return self.lines

    def read_commands(self) -> list[SimpleCommand]:
        while self.position < len(self.text):
            self.read_token()
        self.finish_command()
        if self.heredoc_ends:
            raise ConfigError(
                f"the here-document that `{self.heredoc_ends[0]}` should end has no end", "give the whole script"
            )
        return self.commands

    def read_token(self) -> None:
        """Read one character, or all that belongs to it."""
        _CHARACTER_HANDLERS.get(self.text[self.position], _ShellParser.read_letter)(self)

    def read_letter(self) -> None:
        self.begin_command()
        self.open_command.add_text(self.text[self.position])
        self.position += 1

    def begin_command(self) -> None:
        """Note the line on which a command begins."""
        if not self.open_command.words and self.open_command.current is None:
            self.open_command.line = self.current_line()

    def read_blank(self) -> None:
        self.open_command.end_word()
        self.position += 1

    def read_comment(self) -> None:
        if self.open_command.current is not None:
            self.open_command.add_text("#")
            self.position += 1
            return
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end

    def read_escape(self) -> None:
        following = self.text[self.position + 1 : self.position + 2]
        if following != "\n":
            self.begin_command()
            self.open_command.add_text(following)
        self.position += 2

    def read_single_quoted(self) -> None:
        self.begin_command()
        end = self.text.find("'", self.position + 1)
        if end < 0:
            raise self.unclosed_error("'", self.position)
        self.open_command.add_text(self.text[self.position + 1 : end])
        self.position = end + 1

    def read_double_quoted(self) -> None:
        self.begin_command()
        start = self.position
        self.position += 1
        self.open_command.add_text("")
        while self.position < len(self.text) and self.text[self.position] != '"':
            character = self.text[self.position]
            if character == "\\" and self.text[self.position + 1 : self.position + 2] in ("\n", '"', "\\", "$", "`"):
                following = self.text[self.position + 1]
                self.open_command.add_text("" if following == "\n" else following)
                self.position += 2
            elif character in "$`":
                self.expand_variable(quoted=True)
            else:
                self.open_command.add_text(character)
                self.position += 1
        if self.position >= len(self.text):
            raise self.unclosed_error('"', start)
        self.position += 1

    def read_variable(self) -> None:
        self.begin_command()
        self.expand_variable(quoted=self.open_command.is_assignment())

    def expand_variable(self, quoted: bool) -> None:
        """Put the value of a variable that the script has set; leave what only a shell can know."""
        match = _EXPANSION.match(self.text, self.position)
        if match is None:
            end = _find_substitution_end(self.text, self.position)
            if end == 0:
                opening = self.text[self.position : self.position + 2].removesuffix("`") or "`"
                raise self.unclosed_error(opening if opening[0] == "$" else "`", self.position)
            self.open_command.add_text(evaluate_sum(self.text[self.position : end], self.variables))
            self.position = end
            return
        name, array, default, plain = match.groups()
        self.position = match.end()
        values = self.variables.get(name or plain, [])
        if not any(values):
            values = [default] if default is not None else [match.group()]
        if array is None:
            values = values[:1] if quoted else _split_words(values[0]) or [""]
        self.expanded += sum(map(len, values))
        if self.expanded > _MAX_EXPANDED:
            line = self.current_line()
            raise ConfigError(
                f"line {line}: variables hold more than {_MAX_EXPANDED} characters", "give the command alone"
            )
        for number, value in enumerate(values):
            if number:
                self.open_command.end_word()
            self.open_command.add_text(value)

    def read_bracket(self) -> None:
        """`NAME=( ... )` is an array; other brackets only group commands."""
        name = re.fullmatch(r"([A-Za-z_]\w*)\+?=", self.open_command.current or "")
        start, self.position = self.position, self.position + 1
        if name is None:
            self.finish_command()
            return
        outer, self.open_command = self.open_command, _OpenCommand(self.current_line())
        self.in_array = True
        while self.position < len(self.text) and self.text[self.position] != ")":
            self.read_token()
        if self.position >= len(self.text):
            raise self.unclosed_error("(", start)
        self.in_array = False
        self.position += 1
        self.open_command.end_word()
        before = self.variables.get(name.group(1), []) if "+=" in name.group() else []
        self.variables[name.group(1)] = [*before, *self.open_command.words]
        self.open_command = outer
        self.open_command.current = None

    def read_operator(self) -> None:
        self.finish_command()
        self.position += 1

    def read_newline(self) -> None:
        if self.in_array:
            self.read_blank()
            return
        self.finish_command()
        self.position += 1
        while self.heredoc_ends:
            end = re.compile(rf"^\t*{re.escape(self.heredoc_ends[0])}$", re.M).search(self.text, self.position)
            if end is None:
                raise ConfigError(
                    f"line {self.current_line() - 1}: the here-document that `{self.heredoc_ends[0]}` should end has "
                    f"no end",
                    "give the whole script",
                )
            self.position = end.end()
            self.heredoc_ends.pop(0)

    def read_redirection(self) -> None:
        """`> FILE`, `2>&1`, `< FILE` are no words of the command; `<< END` begins a here-document."""
        if (self.open_command.current or "").isdigit():
            self.open_command.current = None
        self.open_command.end_word()
        match = re.compile(r"(<<-?|[<>]{1,3})&?[ \t]*", re.S).match(self.text, self.position)
        assert match is not None, "called at < or >"
        self.position = match.end()
        if match.group(1) in ("<<", "<<-"):
            word = re.compile(r"['\"\\]?([^\s'\";&|<>()]+)['\"]?").match(self.text, self.position)
            if word:
                self.heredoc_ends.append(word.group(1))
                self.position = word.end()
            return
        words = len(self.open_command.words)
        while self.position < len(self.text) and self.text[self.position] not in " \t\n;&|()<>":
            self.read_token()
        self.open_command.current = None
        del self.open_command.words[words:]

    def unclosed_error(self, mark: str, at: int) -> ConfigError:
        kind = "quote" if mark in "'\"`" else "bracket"
        line = self.text.count("\n", 0, at) + 1
        return ConfigError(f"line {line}: the {kind} {mark} is never closed", "give the whole command")

    def finish_command(self) -> None:
        """End a command: note what it assigns, or keep it."""
        self.open_command.end_word()
        words, line = self.open_command.words, self.open_command.line
        self.open_command = _OpenCommand(self.current_line())
        while words and words[0] in _KEYWORDS:
            if words[0] in _HEADS:
                return
            words = words[1:]
        declares = bool(words) and words[0] in _DECLARATIONS
        if declares:
            for word in words[1:]:
                self.assign_variable(word, export=words[0] == "export" or "-x" in words)
            return
        local = 0
        while local < len(words) and _ASSIGNMENT.match(words[local]):
            local += 1
        if local == len(words):
            for word in words:
                self.assign_variable(word, export=False)
            return
        local_variables = dict(word.split("=", 1) for word in words[:local])
        self.commands.append(SimpleCommand(tuple(words[local:]), {**self.exported, **local_variables}, line))

    def assign_variable(self, word: str, export: bool) -> None:
        match = _ASSIGNMENT.match(word)
        name = match.group(1) if match else word
        if match:
            before = self.variables.get(name, [""])[0] if match.group().endswith("+=") else ""
            self.variables[name] = [before + word[match.end() :]]
        if (export or name in self.exported) and name in self.variables:
            self.exported[name] = " ".join(self.variables[name])


def _find_substitution_end(text: str, start: int) -> int:
    """Return where `$(...)`, `${...}` or a pair of backquotes ends that begins at `start`, 0 where it has no end.

    Another character ends behind itself.
    """
    opening = text[start : start + 2] if text[start] == "$" else text[start]
    closer = {"$(": ")", "${": "}", "`": "`"}.get(opening)
    if closer is None:
        return start + 1
    depth, at = 1, start + len(opening)
    while at < len(text):
        character = text[at]
        if opening != "`" and character in "'\"" and (end := text.find(character, at + 1)) > 0:
            at = end + 1  # brackets between quotes are text
            continue
        if character == closer:
            depth -= 1
        elif character == opening[-1]:
            depth += 1
        at += 2 if character == "\\" else 1
        if depth == 0:
            return at
    return 0


def _split_words(value: str) -> list[str]:
    """Return the words of a value as a shell splits it; what only a shell can know, `$(...)` and the like, is one."""
    words, at, is_torn = [""], 0, False
    while at < len(value):
        end = 0 if is_torn else _find_substitution_end(value, at)
        is_torn, end = end == 0, end or at + 1
        if value[at].isspace():
            words.append("")
        else:
            words[-1] += value[at:end]
        at = end
    return [word for word in words if word]


_CHARACTER_HANDLERS = {
    " ": _ShellParser.read_blank,
    "\t": _ShellParser.read_blank,
    "\n": _ShellParser.read_newline,
    "#": _ShellParser.read_comment,
    "\\": _ShellParser.read_escape,
    "'": _ShellParser.read_single_quoted,
    '"': _ShellParser.read_double_quoted,
    "$": _ShellParser.read_variable,
    "`": _ShellParser.read_variable,
    ";": _ShellParser.read_operator,
    "&": _ShellParser.read_operator,
    "|": _ShellParser.read_operator,
    ")": _ShellParser.read_operator,
    "(": _ShellParser.read_bracket,
    "<": _ShellParser.read_redirection,
    ">": _ShellParser.read_redirection,
}


_EXPRESSION = re.compile(r"\$\(\((.*)\)\)|\$\(\s*expr\s(.*)\)", re.S)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}


def evaluate_sum(text: str, known: Mapping[str, Sequence[str]]) -> str:
    """Return the result of a sum of two whole numbers; other text as it is.

    Args:
        text: `$((A * B))` or `$(expr A / B)`, of numbers and variables.
        known: variables that the script has set.
    """
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        return text
    inner = _VARIABLE.sub(r"\1", match[1] or match[2] or "").replace("\\", "")
    found = re.findall(r"\w+|[-+*/%]", inner)
    if len(found) != 3 or "".join(found) != "".join(inner.split()) or found[1] not in _OPERATORS:
        return text
    left, right = (known.get(word, [word])[0] for word in found[::2])
    if not all(re.fullmatch(r"\d{1,18}", one) for one in (left, right)) or (found[1] in "/%" and int(right) == 0):
        return text
    return str(_OPERATORS[found[1]](int(left), int(right)))
