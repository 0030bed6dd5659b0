"""Who has which block of the cache: counted, shared between equal beginnings, taken back from the oldest.

Full blocks are known by a digest of all tokens up to their end, so a request that begins like an earlier one takes its
blocks instead of reading those tokens again (the idea of vLLM's automatic prefix caching). A request's blocks are laid
side by side where there is room: attention then reads them where they lie.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

SIZE = 16
"""Tokens of a block."""
_AHEAD = 64
"""Blocks that are kept free behind a request at most, as long as nobody else needs them."""


def digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of a full block: of its tokens and of everything before them."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Table:
    """The blocks of one request in the order of its tokens.

    Attributes:
        ids: blocks; runs: the same as `[first, count]` of consecutive ones.
        ahead: `(first, end)` of the places kept free for it.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.runs: list[list[int]] = []
        self.ahead = (0, 0)

    def append(self, block: int) -> None:
        """Add a block at the end."""
        if self.runs and block == self.ids[-1] + 1:
            self.runs[-1][1] += 1
        else:
            self.runs.append([block, 1])
        self.ids.append(block)


class Blocks:
    """The bookkeeping of `count` blocks.

    A block is free, or in use by some requests, or idle: in use by none, but known by its digest. Idle blocks are taken
    back when no free one is left, those first that have been idle longest.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = np.ones(count, dtype=bool)
        self._kept = np.zeros(count, dtype=bool)  # ahead of some request
        self._num_free = count
        self._users = [0] * count
        self._names: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that nobody uses."""
        return self._num_free + len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks that nobody uses, whose tokens are known."""
        return len(self._idle)

    def known(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest beginning of `names` that is in the cache."""
        found = []
        for name in names:
            block = self._known.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def room_for(self, shared: Sequence[int], more: int) -> bool:
        """True when so many blocks are left beside those that are to be shared."""
        return more <= self.available - sum(block in self._idle for block in shared)

    def share(self, table: Table, blocks: Sequence[int]) -> None:
        """Let a request use blocks that are there already."""
        for block in blocks:
            self._users[block] += 1
            self._idle.pop(block, None)
            table.append(block)

    def grow(self, table: Table, blocks: int, expected: int) -> bool:
        """Give a request so many blocks in all; False, and nothing is given, when there are not as many.

        Args:
            expected: blocks that it may need in the end; they are kept free behind it while there is room.
        """
        missing = blocks - len(table.ids)
        if missing > self.available:
            return False
        for _ in range(missing):
            table.append(self._take(table, expected - len(table.ids)))
        return True

    def name(self, block: int, name: bytes) -> None:
        """Make a full block known; the first of equal ones stays so."""
        if name not in self._known and block not in self._names:
            self._known[name] = block
            self._names[block] = name

    def release(self, table: Table) -> None:
        """Take a request's blocks back. The last of it is taken from others first: beginnings are shared more often."""
        for block in reversed(table.ids):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._names:
                self._idle[block] = None
            else:
                self._give_back(block)
        self._kept[slice(*table.ahead)] = False
        table.ids, table.runs, table.ahead = [], [], (0, 0)

    def forget(self) -> None:
        """Make idle blocks free."""
        for block in list(self._idle):
            self._forget(block)

    def _forget(self, block: int) -> None:
        del self._idle[block]
        del self._known[self._names.pop(block)]
        self._give_back(block)

    def _give_back(self, block: int) -> None:
        self._free[block] = True
        self._num_free += 1

    def _take(self, table: Table, expected: int) -> int:
        if not self._num_free:
            for _ in range(min(len(self._idle), max(1, min(expected, _AHEAD)))):
                self._forget(next(iter(self._idle)))
        after = table.ids[-1] + 1 if table.ids else self.count
        block = after if after < self.count and self._free[after] else self._begin(table, expected)
        self._free[block] = False
        self._num_free -= 1
        self._users[block] = 1
        return block

    def _begin(self, table: Table, expected: int) -> int:
        """Choose where a request's blocks go on: the smallest gap that holds all that is expected, else the largest,
        behind no other request if possible."""
        self._kept[slice(*table.ahead)] = False
        unclaimed = self._free & ~self._kept
        starts, lengths = _gaps(unclaimed if unclaimed.any() else self._free)
        wanted = max(1, min(expected, _AHEAD))
        fitting = np.flatnonzero(lengths >= wanted)
        best = fitting[lengths[fitting].argmin()] if len(fitting) else lengths.argmax()
        start = int(starts[best])
        table.ahead = (start, start + min(wanted, int(lengths[best])))
        self._kept[slice(*table.ahead)] = True
        return start


def _gaps(free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where runs of True start, and how long they are; there is one at least."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.astype(np.int8), [0]))))
    return edges[::2], edges[1::2] - edges[::2]
