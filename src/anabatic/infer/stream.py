"""Text from tokens as they come, never with half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character (RFC 3629)."""
_WINDOW = 32
_KEPT = 8


class TextStream:
    """Turns the tokens of one answer into text. The pieces of `push` and `finish` together are the decoded
    answer.

    Only the last tokens are decoded again on every push, so the cost of a token does not grow with the
    answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._said = 0

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain, possibly none."""
        self._window.append(token)
        text = decode(self._tokenizer, self._window)
        certain = len(text) - _open_end(text)
        piece = text[self._said : certain]
        self._said = max(self._said, certain)
        if len(self._window) > _WINDOW and certain == len(text):
            self._forget()
        return piece

    def finish(self) -> str:
        """Return what is left: replacement characters where the last bytes never became a character."""
        text = decode(self._tokenizer, self._window)
        piece = text[self._said :]
        self._window, self._said = [], 0
        return piece

    def _forget(self) -> None:
        """Keep the last tokens as context: decoders drop a leading blank, or join a token to the one before
        it."""
        self._window = self._window[-_KEPT:]
        self._said = len(decode(self._tokenizer, self._window))


def _open_end(text: str) -> int:
    """Return how many characters at the end of `text` further bytes may still turn into one character."""
    closed = text.rstrip(REPLACEMENT)
    return min(len(text) - len(closed), _LONGEST_CHARACTER - 1)


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of tokens without special ones, spaces as they are."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class StopStrings:
    """Passes text on, but for what may be the beginning of a text that ends the answer.

    Attributes:
        texts: those that end it.
        found: the one that came first; nothing passes any more.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self.found: str | None = None
        self._held = ""

    def push(self, piece: str) -> str:
        """Take a piece of text; return what is certain to stand before any of the texts."""
        if not self.texts or self.found is not None:
            return "" if self.texts else piece
        text = self._held + piece
        places = [(text.find(one), -len(one), one) for one in self.texts if one in text]
        if places:
            place, _, self.found = min(places)
            self._held = ""
            return text[:place]
        kept = max(overlap(text, one) for one in self.texts)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """Return what was held back: nothing came of it."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, end: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `end`, which is not in it whole."""
    longest = min(len(text), len(end) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(end[:size])), 0)
