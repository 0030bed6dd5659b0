"""Reasoning in what a model says: `<think>` text `</think>` before the answer, found while the text comes.

Qwen3 writes both tags; DeepSeek-R1 and Qwen3-Thinking-2507 write the second alone, because their chat templates end the
prompt with the first (their `tokenizer_config.json` on Hugging Face). Whether a model was taught to is seen in its chat
template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from anabatic.infer.text_stream import measure_overlap

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_PROMPT_END_TOKENS = 8
"""Tokens at the end of a prompt in which its last words are looked for: the tag may be several."""


class SplitText(NamedTuple):
    """A piece of an answer: what is reasoning of it, and what is not."""

    reasoning: str
    content: str


def writes_reasoning(tokenizer: Any) -> bool:
    """True when a chat template has the tags, and no decoder leaves them out as special tokens."""
    template = tokenizer.chat_template
    text = "".join(template.values()) if isinstance(template, dict) else template or ""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return THINK_OPEN in text and THINK_CLOSE in text and not special & {THINK_OPEN, THINK_CLOSE}


def begins_in_reasoning(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """True when a prompt ends with the opening tag."""
    end: str = tokenizer.decode(list(prompt[-_PROMPT_END_TOKENS:]), clean_up_tokenization_spaces=False)
    return end.rstrip().endswith(THINK_OPEN)


class ReasoningParser:
    """Splits one answer, in pieces of any size. Blanks around the reasoning and before the answer belong to neither.

    Only what stands before the answer is reasoning; later tags are text. An answer that ends before the closing tag is
    reasoning alone.

    Args:
        begins_inside: the prompt ends with the opening tag.
    """

    def __init__(self, begins_inside: bool = False) -> None:
        self._state: Literal["start", "reasoning", "content"] = "reasoning" if begins_inside else "start"
        self._buffer = ""
        self._is_blank = True  # nothing but blanks since the state began

    def push_text(self, piece: str, last: bool = False) -> SplitText:
        """Take a piece; return what has become certain.

        Args:
            last: nothing more will come.
        """
        self._buffer += piece
        if self._state == "start":
            self._find_opening(last)
        reasoning = self._take_reasoning(last) if self._state == "reasoning" else ""
        return SplitText(reasoning, self._take_content() if self._state == "content" else "")

    def _find_opening(self, last: bool) -> None:
        text = self._buffer.lstrip()
        if text.startswith(THINK_OPEN):
            self._state, self._buffer = "reasoning", text[len(THINK_OPEN) :]
        elif last or (text and not THINK_OPEN.startswith(text)):
            self._state, self._is_blank = "content", False  # an answer without reasoning stays as it is

    def _take_reasoning(self, last: bool) -> str:
        text, closed, after = self._buffer.partition(THINK_CLOSE)
        if self._is_blank:
            text = text.lstrip()
        if closed:
            self._state, self._buffer, self._is_blank = "content", after, True
            return text.rstrip()
        kept = 0 if last else measure_overlap(text, THINK_CLOSE)
        sure = text[: len(text) - kept].rstrip()
        self._buffer = text[len(sure) :] if not last else ""
        self._is_blank = self._is_blank and not sure
        return sure

    def _take_content(self) -> str:
        text = self._buffer.lstrip() if self._is_blank else self._buffer
        self._buffer, self._is_blank = "", self._is_blank and not text
        return text
