"""Preference pairs: two answers to one question, tokenised, stored as one entry, laid side by side.

An entry of a shard holds the better conversation's ids and, behind them, the other's, each at most `seq_len` tokens
long. In its mask 1 is learned, and 2 marks the second conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from anabatic.core.errors import DataError
from anabatic.data.batching.packing import Batch, TokenSegment, collate_packed
from anabatic.data.readers.document import SKIP_HINT, Document, Message
from anabatic.data.vision.row_pictures import TAG, VIDEO_TAG, count_tags

TARGET_BIT, REJECTED_BIT = 1, 2
PICTURE_BREAK = b"\n"
"""Between the pictures of the better conversation and those of the other, which are one line each."""
_PAIR_HINT = 'a pair is "prompt", "chosen" and "rejected", or "messages" and "rejected_response"'


def max_pair_inputs(seq_len: int) -> int:
    """Return the most inputs of a pair whose sides have at most `seq_len` tokens each."""
    return 2 * seq_len


def split_pair_messages(document: Document, labels: bool = False) -> tuple[list[Message] | None, list[Message] | None]:
    """Return the two conversations of a pair; the assistant's turns that both begin with have weight 0.

    Args:
        labels: a row may be one answer with a label; the other side is None then.

    Raises:
        DataError: the row has one answer (and no label, where that would do), or the same one twice.
    """
    chosen, rejected = document.messages or [], document.rejected
    if rejected is None and labels:
        if document.label is None:
            raise DataError(
                f"{document.location}: one answer without a label", f'"label" is true or false; {SKIP_HINT}'
            )
        return (chosen, None) if document.label else (None, chosen)
    if rejected is None:
        raise DataError(f"{document.location}: one answer, where a pair has two", f"{_PAIR_HINT}; {SKIP_HINT}")
    if chosen == rejected:
        raise DataError(
            f"{document.location}: both answers are the same: nothing to prefer", f"fix the row, {SKIP_HINT}"
        )
    same = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        same += 1
    return _zero_shared_weights(chosen, same), _zero_shared_weights(rejected, same)


def require_equal_tags(location: str, chosen: list[Message], rejected: list[Message]) -> None:
    """Refuse pairs of which one side shows pictures at other places: the other would have them before its question."""
    for tag in (TAG, VIDEO_TAG):
        first, second = count_tags(chosen, tag), count_tags(rejected, tag)
        if first != second:
            raise DataError(
                f"{location}: {first} x {tag} with the better answer, {second} with the other",
                f"let pictures stand in the question, which both share; {SKIP_HINT}",
            )


def _zero_shared_weights(turns: list[Message], same: int) -> list[Message]:
    shared = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in turns[:same]]
    return shared + turns[same:]


def collate_preference_pairs(
    pieces: Sequence[TokenSegment], capacity: int, pad_id: int, seq_len: int, state: dict[str, Any] | None = None
) -> Batch:
    """Lay pairs into one batch, each as two segments, the better answer first; `num_targets` counts the pairs.

    Args:
        pieces: whole pairs, together at most `capacity` tokens.
        seq_len: `max_pair_inputs` of a side's.
    """
    sides = [side for piece in pieces for side in split_pair_segment(piece)]
    batch = collate_packed(sides, capacity, pad_id, max(1, seq_len // 2), state)
    return replace(batch, num_targets=len(pieces))


def collate_unpaired_answers(
    pieces: Sequence[TokenSegment], capacity: int, pad_id: int, seq_len: int, state: dict[str, Any] | None = None
) -> Batch:
    """Lay answers into one batch, those of a pair one after the other; `num_targets` counts them.

    `extra` tells of each answer whether it is a good one (`desirable`, bool `[A]`) and the number of its entry.

    Args:
        pieces: whole entries, together at most `capacity` tokens.
        seq_len: `max_pair_inputs` of a side's.
    """
    present = [
        (side, good, number)
        for number, piece in enumerate(pieces)
        for side, good in zip(split_pair_segment(piece), (True, False), strict=True)
        if len(side.ids)
    ]
    sides, goods, numbers = zip(*present, strict=True)
    batch = collate_packed(sides, capacity, pad_id, max(1, seq_len // 2), state)
    extra = {"desirable": torch.tensor(goods), "entry": torch.tensor(numbers)}
    return replace(batch, num_targets=len(present), extra=extra)


def split_pair_segment(pair: TokenSegment) -> tuple[TokenSegment, TokenSegment]:
    """Return the two conversations of an entry; without tokens is the one that a single answer lacks."""
    assert pair.loss_mask is not None  # every pair has one
    second = (pair.loss_mask & REJECTED_BIT) != 0
    border = int(np.argmax(second)) if second.any() else len(second)
    first, _, other = pair.pictures.partition(PICTURE_BREAK)
    return (
        TokenSegment(pair.ids[:border], pair.loss_mask[:border] & TARGET_BIT, pictures=first),
        TokenSegment(pair.ids[border:], pair.loss_mask[border:] & TARGET_BIT, pictures=other),
    )
