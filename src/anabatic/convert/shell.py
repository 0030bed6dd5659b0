"""A shell script as the commands it would run, as far as they are written out.

Quotes, escapes, comments, joined lines, here-documents, redirections, assignments, `export`, arrays and variables that
the script itself sets are followed (POSIX.1-2024, chapter 2, and Bash's arrays). Nothing is run: `$(...)` and variables
from outside stay as they are typed, and both sides of an `if` count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from anabatic.convert import arithmetic
from anabatic.core.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=")
_EXPANSION = re.compile(r"\$(?:\{([A-Za-z_]\w*)(\[[@*]\])?(?::?[-=]([^{}]*))?\}|([A-Za-z_]\w*))")
_KEYWORDS = frozenset(
    ("if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "{", "}", "!", "time")
)
_DECLARES = frozenset(["export", "declare", "typeset", "readonly", "local"])


@dataclass(frozen=True)
class Simple:
    """One command: its words, the variables it gets, and the line (from 1) on which it begins."""

    words: tuple[str, ...]
    variables: dict[str, str]
    line: int


@dataclass
class _Words:
    """The command that is being read."""

    line: int
    words: list[str] = field(default_factory=list)
    current: str | None = None

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text

    def end(self) -> None:
        if self.current is not None:
            self.words.append(self.current)
        self.current = None

    def assigns(self) -> bool:
        """True inside the value of an assignment, which is never parted at blanks."""
        before = self.words[1:] if self.words[:1] and self.words[0] in _DECLARES else self.words
        plain = all(_ASSIGNED.match(word) for word in before)
        return plain and self.current is not None and _ASSIGNED.match(self.current) is not None


def read(text: str) -> list[Simple]:
    """Return the commands of a script, or of a line as it is typed.

    Raises:
        ConfigError: a quote, bracket or here-document is never closed.
    """
    return _Script(text.replace("\r\n", "\n")).read()


class _Script:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines, self.counted = 1, 0
        self.known: dict[str, list[str]] = {"HOME": ["~"]}
        self.exported: dict[str, str] = {}
        self.found: list[Simple] = []
        self.open = _Words(1)
        self.array = False
        """Inside NAME=( ... ), where a new line is a blank."""
        self.ends: list[str] = []
        """Words that end the here-documents whose text begins on the next line."""

    def line(self) -> int:
        """Return the line (from 1) of the place that is being read; it only moves forward."""
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = max(self.at, self.counted)
        return self.lines

    def read(self) -> list[Simple]:
        while self.at < len(self.text):
            self.step()
        self.finish()
        if self.ends:
            raise ConfigError(f"the here-document that `{self.ends[0]}` should end has no end", "give the whole script")
        return self.found

    def step(self) -> None:
        """Read one character, or all that belongs to it."""
        _CHARACTERS.get(self.text[self.at], _Script.letter)(self)

    def letter(self) -> None:
        self.begin()
        self.open.add(self.text[self.at])
        self.at += 1

    def begin(self) -> None:
        """Note the line on which a command begins."""
        if not self.open.words and self.open.current is None:
            self.open.line = self.line()

    def blank(self) -> None:
        self.open.end()
        self.at += 1

    def comment(self) -> None:
        if self.open.current is not None:
            self.open.add("#")
            self.at += 1
            return
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def escape(self) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following != "\n":
            self.begin()
            self.open.add(following)
        self.at += 2

    def single(self) -> None:
        self.begin()
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self.unclosed("'", self.at)
        self.open.add(self.text[self.at + 1 : end])
        self.at = end + 1

    def double(self) -> None:
        self.begin()
        start = self.at
        self.at += 1
        self.open.add("")
        while self.at < len(self.text) and self.text[self.at] != '"':
            character = self.text[self.at]
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in ("\n", '"', "\\", "$", "`"):
                following = self.text[self.at + 1]
                self.open.add("" if following == "\n" else following)
                self.at += 2
            elif character in "$`":
                self.expand(quoted=True)
            else:
                self.open.add(character)
                self.at += 1
        if self.at >= len(self.text):
            raise self.unclosed('"', start)
        self.at += 1

    def variable(self) -> None:
        self.begin()
        self.expand(quoted=self.open.assigns())

    def expand(self, quoted: bool) -> None:
        """Put the value of a variable that the script has set; leave what only a shell can know."""
        match = _EXPANSION.match(self.text, self.at)
        if match is None:
            end = self.closing() if self.text[self.at : self.at + 2] in ("$(", "${") or self.text[self.at] == "`" else 0
            end = end or self.at + 1
            self.open.add(arithmetic.result(self.text[self.at : end], self.known))
            self.at = end
            return
        name, array, default, plain = match.groups()
        self.at = match.end()
        values = self.known.get(name or plain, [])
        if not any(values):
            values = [default] if default is not None else [match.group()]
        if array is None:
            values = values[:1] if quoted else [piece for piece in values[0].split()] or [""]
        for number, value in enumerate(values):
            if number:
                self.open.end()
            self.open.add(value)

    def closing(self) -> int:
        """Return where `$(...)`, `${...}` or a pair of backquotes ends."""
        opening = self.text[self.at : self.at + 2] if self.text[self.at] == "$" else "`"
        closer = {"$(": ")", "${": "}", "`": "`"}[opening]
        depth, at = 1, self.at + len(opening)
        while at < len(self.text):
            character = self.text[at]
            if character == closer:
                depth -= 1
            elif character == opening[-1]:
                depth += 1
            at += 2 if character == "\\" else 1
            if depth == 0:
                return at
        raise self.unclosed(opening, self.at)

    def bracket(self) -> None:
        """`NAME=( ... )` is an array; other brackets only group commands."""
        name = re.fullmatch(r"([A-Za-z_]\w*)\+?=", self.open.current or "")
        start, self.at = self.at, self.at + 1
        if name is None:
            self.finish()
            return
        outer, self.open = self.open, _Words(self.line())
        self.array = True
        while self.at < len(self.text) and self.text[self.at] != ")":
            self.step()
        if self.at >= len(self.text):
            raise self.unclosed("(", start)
        self.array = False
        self.at += 1
        self.open.end()
        before = self.known.get(name.group(1), []) if "+=" in name.group() else []
        self.known[name.group(1)] = [*before, *self.open.words]
        self.open = outer
        self.open.current = None

    def operator(self) -> None:
        self.finish()
        self.at += 1

    def newline(self) -> None:
        if self.array:
            self.blank()
            return
        self.finish()
        self.at += 1
        while self.ends:
            end = re.compile(rf"^\t*{re.escape(self.ends[0])}$", re.M).search(self.text, self.at)
            if end is None:
                raise ConfigError(
                    f"line {self.line() - 1}: the here-document that `{self.ends[0]}` should end has no end",
                    "give the whole script",
                )
            self.at = end.end()
            self.ends.pop(0)

    def redirection(self) -> None:
        """`> FILE`, `2>&1`, `< FILE` are no words of the command; `<< END` begins a here-document."""
        if (self.open.current or "").isdigit():
            self.open.current = None
        self.open.end()
        match = re.compile(r"(<<-?|[<>]{1,3})&?[ \t]*", re.S).match(self.text, self.at)
        assert match is not None, "called at < or >"
        self.at = match.end()
        if match.group(1) in ("<<", "<<-"):
            word = re.compile(r"['\"\\]?([^\s'\";&|<>()]+)['\"]?").match(self.text, self.at)
            if word:
                self.ends.append(word.group(1))
                self.at = word.end()
            return
        words = len(self.open.words)
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|()<>":
            self.step()
        self.open.current = None
        del self.open.words[words:]

    def unclosed(self, mark: str, at: int) -> ConfigError:
        kind = "quote" if mark in "'\"`" else "bracket"
        line = self.text.count("\n", 0, at) + 1
        return ConfigError(f"line {line}: the {kind} {mark} is never closed", "give the whole command")

    def finish(self) -> None:
        """End a command: note what it assigns, or keep it."""
        self.open.end()
        words, line = self.open.words, self.open.line
        self.open = _Words(self.line())
        while words and words[0] in _KEYWORDS:
            words = words[1:]
        declares = bool(words) and words[0] in _DECLARES
        if declares:
            for word in words[1:]:
                self.assign(word, export=words[0] == "export" or "-x" in words)
            return
        local = 0
        while local < len(words) and _ASSIGNED.match(words[local]):
            local += 1
        if local == len(words):
            for word in words:
                self.assign(word, export=False)
            return
        own = dict(word.split("=", 1) for word in words[:local])
        self.found.append(Simple(tuple(words[local:]), {**self.exported, **own}, line))

    def assign(self, word: str, export: bool) -> None:
        match = _ASSIGNED.match(word)
        name = match.group(1) if match else word
        if match:
            before = self.known.get(name, [""])[0] if match.group().endswith("+=") else ""
            self.known[name] = [before + word[match.end() :]]
        if (export or name in self.exported) and name in self.known:
            self.exported[name] = " ".join(self.known[name])


_CHARACTERS = {
    " ": _Script.blank,
    "\t": _Script.blank,
    "\n": _Script.newline,
    "#": _Script.comment,
    "\\": _Script.escape,
    "'": _Script.single,
    '"': _Script.double,
    "$": _Script.variable,
    "`": _Script.variable,
    ";": _Script.operator,
    "&": _Script.operator,
    "|": _Script.operator,
    ")": _Script.operator,
    "(": _Script.bracket,
    "<": _Script.redirection,
    ">": _Script.redirection,
}
