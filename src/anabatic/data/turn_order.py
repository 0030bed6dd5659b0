"""Who may speak after whom in a conversation."""

from __future__ import annotations

from anabatic.data.document import Message
from anabatic.data.turn_fields import BadRow

_FIRST = ("system", "developer")


def require_order(turns: list[Message]) -> None:
    """Make sure that the turns can have been spoken in this order.

    System messages come first, the assistant does not speak before anybody else has, and a tool answers only the
    assistant or another tool. Two turns of one speaker in a row are fine: data sets contain them.

    Raises:
        BadRow: names the first turn that cannot be where it is.
    """
    before = ""
    for number, turn in enumerate(turns, start=1):
        role = turn["role"]
        if role in _FIRST and before not in ("", *_FIRST):
            raise BadRow(f"message {number} has the role {role!r}, but comes after the {before}'s")
        if role == "assistant" and before in ("", *_FIRST):
            raise BadRow(f"message {number} is the assistant's, but nobody has asked anything before")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRow(f"message {number} is a tool's, but comes after the {before or 'beginning'}")
        before = role
