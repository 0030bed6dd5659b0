"""An address that sorts by the number of its machine: torch's rendezvous orders machines by their addresses."""

from __future__ import annotations

from typing import Any


class Place(str):
    """A machine's address with its number; machines exchange it by pickle.

    Python compares dataclasses (here torch's `_NodeDesc`) field by field, first for equality, then for order.
    """

    number: int

    def __new__(cls, number: int, address: str) -> Place:
        place = super().__new__(cls, address)
        place.number = number
        return place

    def __reduce__(self) -> Any:
        return Place, (self.number, str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.number, str(self)) == (other.number, str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return self.number < other.number if isinstance(other, Place) else super().__lt__(other)

    def __hash__(self) -> int:
        return hash((self.number, str(self)))
