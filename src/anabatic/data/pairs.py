"""Preference pairs: two answers to one question, tokenised, stored as one entry, laid side by side.

An entry of a shard holds the better conversation's ids and, behind them, the other's, each at most `seq_len` tokens
long. In its mask 1 is learned, and 2 marks the second conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.data import chat
from anabatic.data.batch import Batch
from anabatic.data.document import SKIP_HINT, Document, Message
from anabatic.data.encoders import ChatEncoder
from anabatic.data.pack import Piece, flatten
from anabatic.data.shard_write import Encoded

LEARNED, REJECTED = 1, 2
_SHAPES = 'a pair is "prompt", "chosen" and "rejected", or "messages" and "rejected_response"'


def longest(seq_len: int) -> int:
    """Return the most inputs of a pair whose sides have at most `seq_len` tokens each."""
    return 2 * seq_len


class PairEncoder(ChatEncoder):
    """Pairs through a tokenizer's chat template. Learned is what the assistant says where the two have parted."""

    def _render(self, batch: Sequence[Document]) -> list[Any]:
        conversations, names, tools = [], [], []
        for document in batch:
            for side, turns in zip(("chosen", "rejected"), answers(document), strict=True):
                conversations.append(turns)
                names.append(f"{document.place} ({side})")
                tools.append(document.tools)
        rendered = chat.render_full(conversations, self._tokenizer, names=names, tools=tools)
        return list(zip(rendered[::2], rendered[1::2], strict=True))

    def _encoded(self, rendered: Any) -> list[Encoded]:
        counts = self._counts
        lengths = [len(side.ids) for side in rendered]
        room = None if self._seq_len is None else self._seq_len - 1
        pieces = [list(self._learning.pieces(length, room)) for length in lengths]
        if not all(pieces):
            counts.too_long += 1
            return []
        counts.documents += 1
        ids: list[int] = []
        masks: list[np.ndarray] = []
        num_bytes = 0
        for side, ((start, stop), *_), mark in zip(rendered, pieces, (0, REJECTED), strict=True):
            mask = side.mask[start:stop]
            if not mask[1:].any():
                counts.unlearned += 1
                return []
            ids += side.ids[start:stop].tolist()
            masks.append(mask | mark)
            num_bytes += side.num_bytes(start + (start > 0), stop)
        counts.truncated += len(ids) < sum(lengths)
        return [Encoded(ids, np.concatenate(masks).astype(np.uint8).tobytes(), num_bytes, True)]


def answers(document: Document) -> tuple[list[Message], list[Message]]:
    """Return the two conversations of a pair; the assistant's turns that both begin with have weight 0.

    Raises:
        DataError: the row has one answer, or the same one twice.
    """
    chosen, rejected = document.messages or [], document.rejected
    if rejected is None:
        raise DataError(f"{document.place}: one answer, where a pair has two", f"{_SHAPES}; {SKIP_HINT}")
    if chosen == rejected:
        raise DataError(f"{document.place}: both answers are the same: nothing to prefer", f"mend the row, {SKIP_HINT}")
    same = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        same += 1
    return _parted(chosen, same), _parted(rejected, same)


def _parted(turns: list[Message], same: int) -> list[Message]:
    shared = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in turns[:same]]
    return shared + turns[same:]


def flatten_pairs(
    pieces: Sequence[Piece], capacity: int, pad_id: int, seq_len: int, state: dict[str, Any] | None = None
) -> Batch:
    """Lay pairs into one batch, each as two segments, the better answer first; `num_targets` counts the pairs.

    Args:
        pieces: whole pairs, together at most `capacity` tokens.
        seq_len: `longest` of a side's.
    """
    sides = [side for piece in pieces for side in parted(piece)]
    batch = flatten(sides, capacity, pad_id, max(1, seq_len // 2), state)
    return replace(batch, num_targets=len(pieces))


def parted(pair: Piece) -> tuple[Piece, Piece]:
    """Return the two conversations of an entry."""
    assert pair.mask is not None  # every pair has one
    border = int(np.argmax((pair.mask & REJECTED) != 0))
    chosen, rejected = slice(None, border), slice(border, None)
    return (
        Piece(pair.ids[chosen], pair.mask[chosen] & LEARNED),
        Piece(pair.ids[rejected], pair.mask[rejected] & LEARNED),
    )
