"""Text from tokens as they come, never with half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT_CHARACTER = "\ufffd"
"""Replacement for bytes that are not, or not yet, a character."""

_MAX_UTF8_BYTES = 4
"""Bytes of the longest UTF-8 character (RFC 3629)."""
_MAX_WINDOW_TOKENS = 32
_CONTEXT_TOKENS = 8


class TextStream:
    """Turns the tokens of one answer into text. The pieces of `push_token` and `flush` together are the decoded
    answer.

    Only the last tokens are decoded again on every push, so the cost of a token does not grow with the
    answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_emitted = 0

    def push_token(self, token: int) -> str:
        """Take one token; return the text that is now certain, possibly none."""
        self._window.append(token)
        text = decode_tokens(self._tokenizer, self._window)
        certain = len(text) - _count_incomplete_chars(text)
        piece = text[self._num_emitted : certain]
        self._num_emitted = max(self._num_emitted, certain)
        if len(self._window) > _MAX_WINDOW_TOKENS and certain == len(text):
            self._trim_window()
        return piece

    def flush(self) -> str:
        """Return what is left: replacement characters where the last bytes never became a character."""
        text = decode_tokens(self._tokenizer, self._window)
        piece = text[self._num_emitted :]
        self._window, self._num_emitted = [], 0
        return piece

    def _trim_window(self) -> None:
        """Keep the last tokens as context: decoders drop a leading blank, or join a token to the one before
        it."""
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._num_emitted = len(decode_tokens(self._tokenizer, self._window))


def _count_incomplete_chars(text: str) -> int:
    """Return how many characters at the end of `text` further bytes may still turn into one character."""
    closed = text.rstrip(REPLACEMENT_CHARACTER)
    return min(len(text) - len(closed), _MAX_UTF8_BYTES - 1)


def decode_tokens(tokenizer: Any, tokens: list[int]) -> str:
    """Return the text of tokens without special ones, spaces as they are."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class StopStringFilter:
    """Passes text on, but for what may be the beginning of a text that ends the answer.

    Attributes:
        texts: those that end it.
        matched: the one that came first; nothing passes any more.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self.matched: str | None = None
        self._pending = ""

    def push_text(self, piece: str) -> str:
        """Take a piece of text; return what is certain to stand before any of the texts."""
        if not self.texts or self.matched is not None:
            return "" if self.texts else piece
        text = self._pending + piece
        places = [(text.find(one), -len(one), one) for one in self.texts if one in text]
        if places:
            place, _, self.matched = min(places)
            self._pending = ""
            return text[:place]
        kept = max(measure_overlap(text, one) for one in self.texts)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """Return what was held back: nothing came of it."""
        pending, self._pending = self._pending, ""
        return pending


def measure_overlap(text: str, end: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `end`, which is not in it whole."""
    longest = min(len(text), len(end) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(end[:size])), 0)
