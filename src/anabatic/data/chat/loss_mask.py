"""Select the target tokens of a conversation, and shorten, split or drop one that is too long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from anabatic.core.errors import DataError

LossTurns = Literal["assistant", "last", "all"]
TruncationStrategy = Literal["right", "left", "delete", "split"]


@dataclass(frozen=True)
class LossPolicy:
    """Target tokens of a conversation.

    Attributes:
        turns: what the assistant says, its last turn alone, or every token.
        too_long: conversations of more than the longest segment lose their end (`right`) or their beginning (`left`),
            are left out (`delete`), or become several (`split`).
        pairs: rows are preference pairs, and both answers are kept.
        labels: rows may also be single answers with a label, good or bad.
        closed: one more token ends each side of a pair, so that all tokens of the conversation are inputs.
    """

    turns: LossTurns = "assistant"
    too_long: TruncationStrategy = "right"
    pairs: bool = False
    labels: bool = False
    closed: bool = False

    def kept_token_ranges(self, length: int, longest: int | None) -> Iterator[tuple[int, int]]:
        """Yield the ranges of a conversation's `length` tokens that are kept.

        `n` tokens are `n - 1` inputs, so a range has up to `longest + 1`. The ranges of a split share one token, the
        last target of one and the first input of the next: every token but the first is a target once.
        """
        if longest is None or length <= longest + 1:
            yield 0, length
        elif self.too_long == "right":
            yield 0, longest + 1
        elif self.too_long == "left":
            yield length - longest - 1, length
        elif self.too_long == "split":
            for start in range(0, length - 1, longest):
                yield start, min(start + longest + 1, length)


DEFAULT_LOSS_POLICY = LossPolicy()
"""Policy of `pretrain` for conversations."""


def select_target_turns(messages: Sequence[dict[str, Any]], turns: LossTurns, name: str) -> list[bool] | None:
    """Return for every assistant's turn whether it is learned; None: all of them are.

    A turn says so itself by `weight` 0 or 1 (OpenAI's fine-tuning format) or `loss` false or true (ms-swift's).

    Raises:
        DataError: a weight that is neither 0 nor 1, or no turn that is learned.
    """
    assistant_turns = [message for message in messages if message["role"] == "assistant"]
    marked = any("weight" in message or "loss" in message for message in assistant_turns)
    if turns != "last" and not marked:
        return None
    keep = [_read_turn_weight(message, name) for message in assistant_turns]
    if turns == "last":
        keep = [False] * (len(keep) - 1) + keep[-1:]
    if keep and not any(keep):
        raise DataError(
            f"{name}: none of the assistant's {len(keep)} turns is learned (weight 0 or loss false)",
            "give one of them weight 1, or skip such rows with --data.on-bad-row skip",
        )
    return keep


def _read_turn_weight(message: dict[str, Any], name: str) -> bool:
    value = message.get("weight", message.get("loss", 1))
    if value not in (0, 1) or not isinstance(value, (int, float)):  # True and False are 1 and 0
        raise DataError(
            f"{name}: a turn of the assistant has weight {value!r}, and a turn is learned wholly or not at all",
            "use 1 to learn a turn, 0 to pass over it",
        )
    return bool(value)
