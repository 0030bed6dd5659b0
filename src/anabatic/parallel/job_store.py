"""Small values that all ranks of a job see at once, without a collective: no rank has to be at the same line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from anabatic.core.errors import Failure

T = TypeVar("T")


class JobStore:
    """Keys and texts in the store over which the ranks met.

    Args:
        purpose: keys of other purposes are apart.
    """

    def __init__(self, purpose: str) -> None:
        self._store = dist.PrefixStore(f"anabatic/{purpose}", distributed_c10d._get_default_store())

    def put(self, key: str, text: str) -> None:
        """Set a key for all ranks.

        Raises:
            Failure: the store does not answer.
        """
        _call_store(lambda: self._store.set(key, text))

    def find(self, key: str) -> str | None:
        """Return the text of a key at once; None: nobody has set it.

        Raises:
            Failure: the store does not answer.
        """
        return _call_store(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which starts at 0, and return its sum: of several ranks each gets another one.

        Raises:
            Failure: the store does not answer.
        """
        return _call_store(lambda: int(self._store.add(key, number)))


def _call_store(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:  # torch's DistError, and of old versions a plain one
        reason = " ".join(str(error).split())[:200]
        raise Failure(
            f"the store of the job does not answer: {reason}",
            "the process or the machine that held it has ended: look at its messages, then start the job again",
        ) from error
