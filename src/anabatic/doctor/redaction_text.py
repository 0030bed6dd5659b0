"""A text as a reader sees it, for patterns, with the characters of the file behind each of its characters.

Colour codes and characters without width vanish, full-width and accented letters become plain ones, and what is escaped
for JSON, HTML or an address becomes the character that it stands for. What is not removed is given back as it was.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

Span = tuple[int, int, str]
"""First character, first character after, and what takes their place."""

_LOOKALIKES = str.maketrans(
    {
        **dict.fromkeys("∶꞉ː", ":"),
        **dict.fromkeys("│┃┆║¦ǀ∣", "|"),
        **dict.fromkeys("«»„‟″‹›“”「」『』【】〖〗《》", '"'),
        **dict.fromkeys("⇒⟶➜➔➡↦", "→"),
        **dict.fromkeys("–—―‒−", "-"),
        "ł": "l", "Ł": "L", "ı": "i", "ø": "o", "Ø": "O", "đ": "d", "\u2800": "", "\u3164": "", "\u115f": "",
    }
)  # fmt: skip
"""Characters that Unicode keeps apart and people do not."""
_MAX_BLANKS = 16
"""Blanks in a row that patterns see within a line."""
_SUSPECT = re.compile(
    rf"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\\%&^\[]|[^\x00-\x7f]+|(?<=\S)[ \t]{{{_MAX_BLANKS + 1},}}|\r(?=\n)|[^\n](?=\x08)"
)
"""Position of a character that readers do not see, or see as another one."""
_INVISIBLE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]{0,40}[ -/]{0,4}[@-~]|\x1b[\]PX^_]|\x1b[ -/]{0,3}[0-Z^-~]|[^\n]\x08|"
    r"\\{1,2}(?:x1b|u001b|0?33|e)\[[0-9;]{0,20}[A-Za-z]|\^\[\[[0-9;]{0,20}[A-Za-z]|\[[0-9;]{1,20}m|"
    r"\\{1,2}u(?:200[b-f]|202[a-e]|206[0-9]|feff|00ad)|(?<=[^\x00]\x00[^\x00])\x00|\x00(?=[^\x00]\x00[^\x00]\x00)",
    re.IGNORECASE,
)
"""Characters that a terminal or a page does not show."""
_ESCAPED = re.compile(
    r"\\{1,2}u(?P<json>[0-9a-f]{4})|\\{1,2}x(?P<byte>[2-7][0-9a-f])|%(?:25){0,3}(?P<address>3d|3a|22|27|20|26|7b|7d)|"
    r"&\#x0{0,4}(?P<page>[0-9a-f]{2,4});|&\#0{0,4}(?P<decimal>[0-9]{2,5});|&(?P<name>quot|apos|amp|nbsp|equals|colon);",
    re.IGNORECASE,
)
"""Characters that are written as something else; of an address only those that part names from values."""
_NAMED = {"quot": '"', "apos": "'", "amp": "&", "nbsp": " ", "equals": "=", "colon": ":"}


@lru_cache(maxsize=1 << 16)
def _fold_char(char: str) -> str:
    plain = unicodedata.normalize("NFKD", char.translate(_LOOKALIKES)).translate(_LOOKALIKES)
    return "".join(one for one in plain if unicodedata.category(one) not in ("Mn", "Cf", "Me"))


def fold_text(text: str) -> str:
    """Return the letters of `text` as patterns see them."""
    return "".join(map(_fold_char, text))


def _unescape(match: re.Match[str]) -> str:
    kind = match.lastgroup or ""
    if kind == "name":
        return _NAMED[match["name"].lower()]
    code = int(match[kind], 10 if kind == "decimal" else 16)
    is_char = 0x20 <= code < 0xD800 or 0xE000 <= code < 0x10000
    return _fold_char(chr(code)) if is_char else match[0]


def _find_disguised(content: str) -> Iterator[Span]:
    """Yield the places at which patterns see something else than the file has."""
    done = 0
    for suspect in _SUSPECT.finditer(content):
        start, found = suspect.start(), suspect[0]
        if start < done:
            continue
        if invisible := _INVISIBLE.match(content, start):
            yield start, (done := invisible.end()), ""
        elif escaped := _ESCAPED.match(content, start):
            yield start, (done := escaped.end()), _unescape(escaped)
        elif found[0] > "\x7f":
            for place, char in enumerate(found, start):
                if (plain := _fold_char(char)) != char:
                    yield place, place + 1, plain
        elif found[0] in " \t":
            yield start + _MAX_BLANKS, suspect.end(), ""
        elif found[0] < " " or found[0] == "\x7f":
            yield start, start + 1, "" if found == "\r" else " "


class FoldedText:
    """A text with, for each of its characters, the characters of the file that it replaces.

    Attributes:
        text: what patterns see.
    """

    def __init__(self, content: str) -> None:
        self.text = content
        self._originals: list[str] | None = None
        self._head = ""
        """Characters hidden from patterns before the first visible one."""
        if disguised := list(_find_disguised(content)):
            self._fold(content, disguised)

    def _fold(self, content: str, disguised: list[Span]) -> None:
        pieces, originals, done = [], [""], 0  # the first is what stands before all
        for start, end, plain in disguised:
            originals += content[done:start]
            hidden = content[start:end]
            if plain:
                originals += [hidden, *[""] * (len(plain) - 1)]
            else:
                originals[-1] += hidden
            pieces += [content[done:start], plain]
            done = end
        originals += content[done:]
        self.text = "".join((*pieces, content[done:]))
        self._head, self._originals = originals[0], originals[1:]

    def mark_words(self, words: re.Pattern[str], sign: str) -> None:
        """Let patterns see one character in the place of words."""
        if not (found := [match.span() for match in words.finditer(self.text)]):
            return
        originals = list(self.text) if self._originals is None else self._originals
        texts, kept, done = [], [], 0
        for start, end in found:
            texts += [self.text[done:start], sign]
            kept += [*originals[done:start], "".join(originals[start:end])]
            done = end
        self.text, self._originals = "".join((*texts, self.text[done:])), kept + originals[done:]

    def replace_spans(self, spans: Iterable[Span]) -> None:
        """Put something else in the place of spans; of those that overlap, the first."""
        texts, originals, done = [], [], 0
        for start, end, instead in sorted(spans, key=lambda span: (span[0], -span[1])):
            if start < done or (start == end and not instead):
                continue
            texts += [self.text[done:start], instead]
            if self._originals is not None:
                originals += [*self._originals[done:start], *instead]
            done = end
        if not texts:
            return
        texts.append(self.text[done:])
        if self._originals is not None:
            self._originals = originals + self._originals[done:]
        self.text = "".join(texts)

    def remove_matches(self, pattern: re.Pattern[str], find: Callable[[re.Match[str]], Iterable[Span]]) -> None:
        """Replace what `find` returns for the matches of a pattern."""
        self.replace_spans([span for match in pattern.finditer(self.text) for span in find(match)])

    def restore_text(self) -> str:
        """Return the text of the file, with what took the place of other characters."""
        return self.text if self._originals is None else self._head + "".join(self._originals)
