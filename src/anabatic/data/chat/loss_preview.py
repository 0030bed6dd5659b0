"""A conversation as the model sees it, with what is learned marked: for people who want to see it before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from anabatic.core import log
from anabatic.data.chat.preference_pairs import REJECTED_BIT, split_pair_segment
from anabatic.data.shards.reader import ShardSet, ShardSubset

MAX_PREVIEW_CHARS = 2000
MAX_PREVIEW_LINES = 40
_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_NEWLINE = "\u21b5"


class MaskedSpan(NamedTuple):
    """Text of neighbouring tokens that are all learned or all not."""

    text: str
    is_target: bool


def split_by_loss_mask(ids: np.ndarray, mask: np.ndarray, tokenizer: Any) -> list[MaskedSpan]:
    """Return the text of a conversation by what is learned.

    A border may cut a character that several tokens spell, and some tokenizers decode a token otherwise at the
    beginning of a text; so each stretch is what its tokens add to the text before.

    Args:
        ids: `[n]` token ids.
        mask: `[n]`, 1 on what is learned; the first token is no target, whatever it says.
        tokenizer: of transformers.
    """
    learned = np.asarray(mask, dtype=bool).copy()
    learned[:1] = False
    spans: list[MaskedSpan] = []
    before, stop = "", 0
    for what, run in groupby(learned.tolist()):
        stop += len(list(run))
        text = tokenizer.decode(ids[:stop].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        spans.append(MaskedSpan(text[len(before) :], what))
        before = text
    return spans


def format_preview(parts: Sequence[MaskedSpan], colour: bool) -> str:
    """Return the stretches as lines for a terminal: learned text in green, or between `[[` and `]]`.

    Line ends are shown as an arrow and control characters as escapes, so that data cannot steer the terminal. Of more
    than `MAX_PREVIEW_CHARS` characters or `MAX_PREVIEW_LINES` lines, the middle is left out with a note.
    """
    head, tail, left_out = _truncate_middle(parts)
    text = _mark_targets(head, colour)
    if left_out:
        text += f"\n... {left_out:,} characters left out ...\n{_mark_targets(tail, colour)}"
    return text


def _truncate_middle(parts: Sequence[MaskedSpan]) -> tuple[list[MaskedSpan], list[MaskedSpan], int]:
    """Return what is shown before and behind the gap, and the characters in it."""
    full_text = "".join(part.text for part in parts)
    if len(full_text) <= MAX_PREVIEW_CHARS and full_text.count("\n") < MAX_PREVIEW_LINES:
        return list(parts), [], 0
    stop = _chars_of_first_lines(full_text[: MAX_PREVIEW_CHARS // 2], MAX_PREVIEW_LINES // 2)
    start = len(full_text) - _chars_of_first_lines(
        full_text[: -MAX_PREVIEW_CHARS // 2 - 1 : -1], MAX_PREVIEW_LINES // 2
    )
    return _slice_spans(parts, 0, stop), _slice_spans(parts, start, len(full_text)), start - stop


def _chars_of_first_lines(text: str, lines: int) -> int:
    """Return the characters of the first so many lines."""
    at = -1
    for _ in range(lines):
        at = text.find("\n", at + 1)
        if at < 0:
            return len(text)
    return at


def _slice_spans(parts: Sequence[MaskedSpan], start: int, stop: int) -> list[MaskedSpan]:
    sliced, offset = [], 0
    for text, learned in parts:
        cut = text[max(0, start - offset) : max(0, stop - offset)]
        offset += len(text)
        if cut:
            sliced.append(MaskedSpan(cut, learned))
    return sliced


def _mark_targets(parts: Sequence[MaskedSpan], colour: bool) -> str:
    if not colour:
        return "".join(f"[[{_escape_text(text)}]]" if learned else _escape_text(text) for text, learned in parts)
    return "".join(
        # The colour starts again on every line: whoever prefixes or cuts lines keeps it.
        "\n".join(f"{_GREEN if learned else _DIM}{line}{_RESET}" for line in _escape_text(text).split("\n"))
        for text, learned in parts
    )


def _escape_text(text: str) -> str:
    return "".join(map(_escape_character, text))


def _escape_character(one: str) -> str:
    if one == "\n":
        return f"{_NEWLINE}\n"
    return one if one.isprintable() else one.encode("unicode_escape").decode("ascii")


def iter_conversations(
    sets: Sequence[ShardSet | ShardSubset], max_conversations: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield `(source, ids, mask)` of the first `max_conversations`, of every source in turn; of a pair, both."""
    chats = [one for one in sets if one.is_chat]
    deepest = max((one.num_docs for one in chats), default=0)
    places = ((one, number) for number in range(deepest) for one in chats if number < one.num_docs)
    for (one, number), _ in zip(places, range(max_conversations), strict=False):
        entry = one.locate_entry(number)
        piece = one.read_segment(entry, 0, entry.num_inputs)
        assert piece.loss_mask is not None  # every conversation has one
        if not (piece.loss_mask & REJECTED_BIT).any():
            yield one.name, piece.ids, piece.loss_mask
            continue
        for side, answer in zip(("chosen", "rejected"), split_pair_segment(piece), strict=True):
            assert answer.loss_mask is not None
            if len(answer.ids):
                yield f"{one.name} ({side})", answer.ids, answer.loss_mask


def log_conversations(sets: Sequence[ShardSet | ShardSubset], tokenizer: Any, max_conversations: int) -> None:
    """Show the first `max_conversations` conversations of the training data."""
    for name, ids, mask in iter_conversations(sets, max_conversations):
        parts = split_by_loss_mask(ids, mask, tokenizer)
        head = f"a conversation of {name}: {len(ids):,} tokens, {int(np.count_nonzero(mask[1:])):,} of them targets"
        log.info(
            f"{head}, marked [[so]]\n{format_preview(parts, False)}", f"{head} (green)\n{format_preview(parts, True)}"
        )
