"""A conversation as the model sees it, with what is learned marked: for people who want to see it before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from anabatic.core import log
from anabatic.data.pairs import REJECTED, parted
from anabatic.data.part import Part
from anabatic.data.shard_set import ShardSet

MOST_CHARS = 2000
MOST_LINES = 40
_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_NEWLINE = "\u21b5"


class Stretch(NamedTuple):
    """Text of neighbouring tokens that are all learned or all not."""

    text: str
    learned: bool


def stretches(ids: np.ndarray, mask: np.ndarray, tokenizer: Any) -> list[Stretch]:
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
    made: list[Stretch] = []
    before, stop = "", 0
    for what, run in groupby(learned.tolist()):
        stop += len(list(run))
        text = tokenizer.decode(ids[:stop].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        made.append(Stretch(text[len(before) :], what))
        before = text
    return made


def shown(parts: Sequence[Stretch], colour: bool) -> str:
    """Return the stretches as lines for a terminal: learned text in green, or between `[[` and `]]`.

    Line ends are shown as an arrow and control characters as escapes, so that data cannot steer the terminal. Of more
    than `MOST_CHARS` characters or `MOST_LINES` lines, the middle is left out with a note.
    """
    head, tail, left_out = _cut(parts)
    text = _marked(head, colour)
    if left_out:
        text += f"\n... {left_out:,} characters left out ...\n{_marked(tail, colour)}"
    return text


def _cut(parts: Sequence[Stretch]) -> tuple[list[Stretch], list[Stretch], int]:
    """Return what is shown before and behind the gap, and the characters in it."""
    whole = "".join(part.text for part in parts)
    if len(whole) <= MOST_CHARS and whole.count("\n") < MOST_LINES:
        return list(parts), [], 0
    stop = _nth_line(whole[: MOST_CHARS // 2], MOST_LINES // 2)
    start = len(whole) - _nth_line(whole[: -MOST_CHARS // 2 - 1 : -1], MOST_LINES // 2)
    return _between(parts, 0, stop), _between(parts, start, len(whole)), start - stop


def _nth_line(text: str, lines: int) -> int:
    """Return the characters of the first so many lines."""
    at = -1
    for _ in range(lines):
        at = text.find("\n", at + 1)
        if at < 0:
            return len(text)
    return at


def _between(parts: Sequence[Stretch], start: int, stop: int) -> list[Stretch]:
    made, at = [], 0
    for text, learned in parts:
        cut = text[max(0, start - at) : max(0, stop - at)]
        at += len(text)
        if cut:
            made.append(Stretch(cut, learned))
    return made


def _marked(parts: Sequence[Stretch], colour: bool) -> str:
    if not colour:
        return "".join(f"[[{_visible(text)}]]" if learned else _visible(text) for text, learned in parts)
    return "".join(
        # The colour begins anew on every line: whoever prefixes or cuts lines keeps it.
        "\n".join(f"{_GREEN if learned else _DIM}{line}{_RESET}" for line in _visible(text).split("\n"))
        for text, learned in parts
    )


def _visible(text: str) -> str:
    return "".join(map(_character, text))


def _character(one: str) -> str:
    if one == "\n":
        return f"{_NEWLINE}\n"
    return one if one.isprintable() else one.encode("unicode_escape").decode("ascii")


def conversations(sets: Sequence[ShardSet | Part], most: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield `(source, ids, mask)` of the first `most` conversations, of every source in turn; of a pair, both."""
    chats = [one for one in sets if one.is_chat]
    deepest = max((one.num_docs for one in chats), default=0)
    places = ((one, number) for number in range(deepest) for one in chats if number < one.num_docs)
    for (one, number), _ in zip(places, range(most), strict=False):
        entry = one.entry(number)
        piece = one.piece(entry, 0, entry.length)
        assert piece.mask is not None  # every conversation has one
        if not (piece.mask & REJECTED).any():
            yield one.name, piece.ids, piece.mask
            continue
        for side, answer in zip(("chosen", "rejected"), parted(piece), strict=True):
            assert answer.mask is not None
            if len(answer.ids):
                yield f"{one.name} ({side})", answer.ids, answer.mask


def say(sets: Sequence[ShardSet | Part], tokenizer: Any, most: int) -> None:
    """Show the first `most` conversations of the training data."""
    for name, ids, mask in conversations(sets, most):
        parts = stretches(ids, mask, tokenizer)
        head = f"a conversation of {name}: {len(ids):,} tokens, {int(np.count_nonzero(mask[1:])):,} of them learned"
        log.info(f"{head}, marked [[so]]\n{shown(parts, False)}", f"{head} (green)\n{shown(parts, True)}")
