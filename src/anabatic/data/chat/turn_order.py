"""Who may speak after whom in a conversation."""

from __future__ import annotations

from anabatic.data.chat.turn_fields import BadRowError
from anabatic.data.readers.document import Message

_LEADING_ROLES = ("system", "developer")


def require_turn_order(turns: list[Message]) -> None:
    """Make sure that the turns can have been spoken in this order.

    System messages come first, the assistant does not speak before anybody else has, and a tool answers only the
    assistant or another tool. Two turns of one speaker in a row are fine: data sets contain them.

    Raises:
        BadRowError: names the first turn that cannot be where it is.
    """
    before = ""
    for number, turn in enumerate(turns, start=1):
        role = turn["role"]
        if role in _LEADING_ROLES and before not in ("", *_LEADING_ROLES):
            raise BadRowError(f"message {number} has the role {role!r}, but comes after the {before}'s")
        if role == "assistant" and before in ("", *_LEADING_ROLES):
            raise BadRowError(f"message {number} is the assistant's, but nobody has asked anything before")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRowError(f"message {number} is a tool's, but comes after the {before or 'beginning'}")
        before = role
