"""Text from tokens as they come, never with half a character."""

from __future__ import annotations

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
