"""Render conversations as token ids with a loss mask, through the tokenizer's own chat template, marked or not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from os.path import commonprefix
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean
from anabatic.data.chat import hidden_parts
from anabatic.data.chat.loss_mask import LossTurns, select_target_turns
from anabatic.data.tokenizer import hf_folder
from anabatic.data.tokenizer.hf_folder import TEMPLATE_FAILURES, get_python_tool_ids

ROLES = ("system", "user", "assistant", "tool", "developer")
Messages = list[dict[str, Any]]
_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CONVERSATION_HINT = (
    'a conversation is a list of {"role": "user", "content": "..."}; --data.on-bad-row skip skips rows that are not'
)


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation after the template and the tokenizer.

    Attributes:
        ids: int64 token ids.
        mask: uint8, 1 on what the assistant says, the token that closes its turn included; 0 on what the python tool
            answered within it.
        text: the text that was tokenised.
        token_ends: for every token, the character behind it.
        special_tokens_mask: True for control tokens, which stand for no text.
        pictures: in the order of their tokens, as `data.vision.picture_batch.pack_grids` writes them; empty: none.
        is_picture: bool `[n]`, tokens of pictures; None: there are none.
    """

    ids: np.ndarray
    mask: np.ndarray
    text: str
    token_ends: list[int] = field(repr=False)
    special_tokens_mask: np.ndarray = field(repr=False)
    pictures: bytes = b""
    is_picture: np.ndarray | None = None

    def count_text_bytes(self, start: int, stop: int, all_text: bool = False) -> int:
        """Return the UTF-8 bytes that the tokens from `start` to `stop` say for the assistant (or in all)."""
        counted = ~self.special_tokens_mask[:stop] & ((self.mask[:stop] != 0) | all_text)
        counted[:start] = False
        borders = np.flatnonzero(np.diff(counted, prepend=False, append=False)).tolist()
        begins = [self.token_ends[at - 1] if at else 0 for at in borders[::2]]
        stops = [self.token_ends[at - 1] for at in borders[1::2]]
        runs = zip(begins, stops, strict=True)
        return sum(len(self.text[begin:stop].encode()) for begin, stop in runs)


def validate_conversation(messages: Any, name: str, needs_assistant: bool = True) -> None:
    """Make sure that `messages` is a conversation.

    Raises:
        DataError: names the row: not a list, empty, an unknown role, content that is not text, nothing said
            by the assistant although something must be learned.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{name}: the conversation is {'empty' if messages == [] else 'not a list'}", _CONVERSATION_HINT
        )
    for number, message in enumerate(messages, start=1):
        if fault := _find_message_fault(message):
            raise DataError(f"{name}: message {number} {fault}", _CONVERSATION_HINT)
    if needs_assistant and all(message["role"] != "assistant" for message in messages):
        raise DataError(
            f"{name}: {len(messages)} messages, none of them by the assistant: nothing to learn", _CONVERSATION_HINT
        )


def _find_message_fault(message: Any) -> str:
    if not isinstance(message, dict):
        return f"is {type(message).__name__}, not an object"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f"has the role {role!r}, not one of {', '.join(ROLES)}.{did_you_mean(str(role), ROLES)}"
    if content not in ("", None):
        return "" if isinstance(content, str) else f"has content of type {type(content).__name__}, not text"
    speaks = message.get("tool_calls") or message.get("reasoning_content")
    silent_is_fine = content == "" and role != "assistant"
    return "" if speaks or silent_is_fine else "is empty"


def render_conversations(
    conversations: Sequence[Messages],
    tokenizer: Any,
    names: Sequence[str] | None = None,
    tools: Sequence[list[dict[str, Any]] | None] | None = None,
    turns: LossTurns = "assistant",
) -> list[RenderedConversation]:
    """Render conversations and tokenise them in one batch.

    Args:
        conversations: lists of messages.
        tokenizer: a fast tokenizer of transformers.
        names: what messages call each conversation (`file:row`).
        tools: JSON schemas of the functions each conversation may call.
        turns: which turns the mask shows; with `all` a conversation needs no assistant.

    Raises:
        DataError: the template marks nothing, a conversation is malformed, or the template refuses it.
    """
    template = hf_folder.get_chat_template(tokenizer)
    texts: list[str] = []
    spans: list[list[tuple[int, int]]] = []
    for index, messages in enumerate(conversations):
        name = names[index] if names else f"conversation {index + 1}"
        validate_conversation(messages, name, turns != "all")
        keep = select_target_turns(messages, turns, name)
        text, found = _render_with_spans(
            messages, tokenizer, template, name, tools[index] if tools else None, keep is not None
        )
        if keep is not None:
            found = [span for span, learned in zip(found, keep, strict=True) if learned]
        texts.append(text)
        spans.append(found)
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    added = tokenizer.added_tokens_decoder.items()
    special = np.asarray([index for index, token in added if token.special], dtype=np.int64)
    rendered = [_build_rendered(*each, special) for each in zip(encodings, texts, spans, strict=True)]
    if tool := get_python_tool_ids(tokenizer):
        for one in rendered:
            _mask_tool_outputs(one, *tool[2:])
    return rendered


def _render_with_spans(
    messages: Messages, tokenizer: Any, template: str, name: str, tools: list[dict[str, Any]] | None, each: bool
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text and what the assistant says in it: as the template marks it, else by difference.

    Args:
        each: one span for each turn is needed; a template may mark a turn in several pieces.
    """
    # Templates test for a key, so a null reads as the word "None" (transformers drops them likewise).
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    hidden_parts.require_all_shown(
        plain,
        tools,
        template,
        name,
        lambda turns, described: _apply_chat_template(turns, tokenizer, template, name, described)[0],
    )
    if _GENERATION_BLOCK.search(template) and not each:
        return _apply_chat_template(plain, tokenizer, template, name, tools, return_assistant_tokens_mask=True)

    def render_text(turns: Messages, ask: bool) -> str:
        return _apply_chat_template(turns, tokenizer, template, name, tools, add_generation_prompt=ask)[0]

    text = render_text(plain, False)
    ends = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return text, find_assistant_spans(plain, text, render_text, ends, name)


def _apply_chat_template(
    messages: Messages, tokenizer: Any, template: str, name: str, tools: list[dict[str, Any]] | None, **options: bool
) -> tuple[str, list[tuple[int, int]]]:
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template  # annotated as returning a string; returns texts and spans
    try:
        with hf_folder.limit_render_time():
            texts, spans = render(
                [messages], tools=tools, chat_template=template, **options, **tokenizer.special_tokens_map
            )
    except (jinja2.TemplateError, hf_folder.RenderTimeoutError, *TEMPLATE_FAILURES) as error:
        raise DataError(f"{name}: the chat template refuses the conversation: {error}", _CONVERSATION_HINT) from error
    return texts[0], spans[0] if spans else []


def _build_rendered(
    encoding: Any, text: str, spans: list[tuple[int, int]], special: np.ndarray
) -> RenderedConversation:
    offsets = encoding.offsets
    starts = np.fromiter((start for start, _ in offsets), dtype=np.int64, count=len(offsets))
    # A token without text of its own (0, 0) ends where the one before it does.
    ends = list(accumulate((end for _, end in offsets), max))
    stops = np.asarray(ends, dtype=np.int64)
    mask = np.zeros(len(offsets), dtype=np.uint8)
    for start, end in spans:
        mask[(stops > start) & (starts < end)] = 1
    ids = np.asarray(encoding.ids, dtype=np.int64)
    return RenderedConversation(ids, mask, text, ends, np.isin(ids, special))


def _mask_tool_outputs(rendered: RenderedConversation, start: int, end: int) -> None:
    """Mask the output of a tool, which is in the assistant's turn but not written by it: from `start` to `end`, both
    included. One that is never closed ends with the turn."""
    ids, mask = rendered.ids, rendered.mask
    closing = (ids == end) | (mask == 0)
    for first in np.flatnonzero((ids == start) & (mask != 0)).tolist():
        behind = np.flatnonzero(closing[first:])
        mask[first : first + behind[0] + 1 if len(behind) else None] = 0


Message = dict[str, Any]
RenderFn = Callable[[list[Message], bool], str]
"""`(messages, add_generation_prompt) -> text`; raises `DataError` when the template refuses."""
CharSpan = tuple[int, int]

PROBE = "\ue0f1\ue0f2\ue0f3"
"""Private-use characters, which no text begins or ends with."""


def find_assistant_spans(
    messages: list[Message], text: str, render: RenderFn, ends: Sequence[str], name: str
) -> list[CharSpan]:
    """Return the spans of `text` that the assistant says, the token that ends each turn included.

    Args:
        messages: the conversation.
        text: the whole conversation, rendered.
        render: the template.
        ends: special tokens, one of which may end a turn.
        name: the conversation, for messages.

    Raises:
        DataError: the template leaves out an assistant's turn.
    """
    spans: list[CharSpan] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        changed = [*messages[:number], {"role": "assistant", "content": PROBE}, *messages[number + 1 :]]
        probed = render(changed, False)
        if PROBE not in probed:
            raise DataError(
                f"{name}: the chat template leaves out message {number + 1}, by the assistant",
                "use a template that shows every turn, or mark what is learned with {% generation %}",
            )
        start = len(commonprefix((text, probed)))
        behind = _common_suffix_length(text, probed, start)
        start = min(start, _generation_prompt_length(messages[:number], text, render, start))
        stop = len(text) - behind
        spans.append((start, _include_end_token(text, stop, ends)))
    return spans


def _common_suffix_length(one: str, two: str, start: int) -> int:
    """Length of what both end with, behind `start`."""
    return len(commonprefix((one[start:][::-1], two[start:][::-1])))


def _generation_prompt_length(before: list[Message], text: str, render: RenderFn, start: int) -> int:
    """Return the length of the generation prompt: a probe may share the first characters with what is said."""
    try:
        header = render(before, True)
    except DataError:  # some templates refuse to speak after a system message alone
        return start
    return len(header) if text.startswith(header) else start


def _include_end_token(text: str, stop: int, ends: Sequence[str]) -> int:
    """Add the special token that directly follows, or follows one blank."""
    for blank in (0, 1):
        at = stop + blank
        if blank and not text[stop:at].isspace():
            break
        found = max((len(token) for token in ends if text.startswith(token, at)), default=0)
        if found:
            return at + found
    return stop
