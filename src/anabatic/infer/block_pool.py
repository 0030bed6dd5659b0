"""Assign blocks of the cache: counted, shared between equal prefixes, reclaimed from the oldest.

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

BLOCK_SIZE = 16
"""Tokens of a block."""
_MAX_RESERVED_BLOCKS = 64
"""Blocks that are kept free behind a request at most, as long as nobody else needs them."""


def hash_block(before: bytes, tokens: Sequence[int]) -> bytes:
    """Return the name of a full block: of its tokens and of everything before them."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockTable:
    """The blocks of one request in the order of its tokens.

    Attributes:
        block_ids: blocks; runs: the same as `[first, count]` of consecutive ones.
        reserved_range: `(first, end)` of the places kept free for it.
    """

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.runs: list[list[int]] = []
        self.reserved_range = (0, 0)

    def append(self, block: int) -> None:
        """Add a block at the end."""
        if self.runs and block == self.block_ids[-1] + 1:
            self.runs[-1][1] += 1
        else:
            self.runs.append([block, 1])
        self.block_ids.append(block)


class BlockPool:
    """The bookkeeping of `num_blocks` blocks.

    A block is free, or in use by some requests, or idle: in use by none, but known by its digest. Idle blocks are taken
    back when no free one is left, those first that have been idle longest.
    """

    def __init__(self, count: int) -> None:
        self.num_blocks = count
        self._free = np.ones(count, dtype=bool)
        self._reserved = np.zeros(count, dtype=bool)  # ahead of some request
        self._num_free = count
        self._ref_counts = [0] * count
        self._block_hashes: dict[int, bytes] = {}
        self._cached_blocks: dict[bytes, int] = {}
        self._idle_blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that nobody uses."""
        return self._num_free + len(self._idle_blocks)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody uses, whose tokens are known."""
        return len(self._idle_blocks)

    def find_cached_prefix(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest beginning of `names` that is in the cache."""
        found = []
        for name in names:
            block = self._cached_blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def has_room_for(self, shared: Sequence[int], more: int) -> bool:
        """True when so many blocks are left beside those that are to be shared."""
        return more <= self.num_available - sum(block in self._idle_blocks for block in shared)

    def share_blocks(self, table: BlockTable, blocks: Sequence[int]) -> None:
        """Let a request use blocks that are there already."""
        for block in blocks:
            self._ref_counts[block] += 1
            self._idle_blocks.pop(block, None)
            table.append(block)

    def grow_table(self, table: BlockTable, blocks: int, expected: int) -> bool:
        """Give a request so many blocks in all; False, and nothing is given, when there are not as many.

        Args:
            expected: blocks that it may need in the end; they are kept free behind it while there is room.
        """
        missing = blocks - len(table.block_ids)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            table.append(self._allocate_block(table, expected - len(table.block_ids)))
        return True

    def register_hash(self, block: int, name: bytes) -> None:
        """Make a full block known; the first of equal ones stays so."""
        if name not in self._cached_blocks and block not in self._block_hashes:
            self._cached_blocks[name] = block
            self._block_hashes[block] = name

    def release_table(self, table: BlockTable) -> None:
        """Take a request's blocks back. The last of it is taken from others first: beginnings are shared more often."""
        for block in reversed(table.block_ids):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._block_hashes:
                self._idle_blocks[block] = None
            else:
                self._free_block(block)
        self._reserved[slice(*table.reserved_range)] = False
        table.block_ids, table.runs, table.reserved_range = [], [], (0, 0)

    def free_idle_blocks(self) -> None:
        """Make idle blocks free."""
        for block in list(self._idle_blocks):
            self._evict_block(block)

    def _evict_block(self, block: int) -> None:
        del self._idle_blocks[block]
        del self._cached_blocks[self._block_hashes.pop(block)]
        self._free_block(block)

    def _free_block(self, block: int) -> None:
        self._free[block] = True
        self._num_free += 1

    def _allocate_block(self, table: BlockTable, expected: int) -> int:
        if not self._num_free:
            for _ in range(min(len(self._idle_blocks), max(1, min(expected, _MAX_RESERVED_BLOCKS)))):
                self._evict_block(next(iter(self._idle_blocks)))
        after = table.block_ids[-1] + 1 if table.block_ids else self.num_blocks
        block = after if after < self.num_blocks and self._free[after] else self._choose_start(table, expected)
        self._free[block] = False
        self._num_free -= 1
        self._ref_counts[block] = 1
        return block

    def _choose_start(self, table: BlockTable, expected: int) -> int:
        """Choose where a request's blocks continue: the smallest gap that holds all that is expected, else the largest,
        behind no other request if possible."""
        self._reserved[slice(*table.reserved_range)] = False
        unclaimed = self._free & ~self._reserved
        starts, lengths = _find_gaps(unclaimed if unclaimed.any() else self._free)
        reserved = max(1, min(expected, _MAX_RESERVED_BLOCKS))
        fitting = np.flatnonzero(lengths >= reserved)
        best = fitting[lengths[fitting].argmin()] if len(fitting) else lengths.argmax()
        start = int(starts[best])
        table.reserved_range = (start, start + min(reserved, int(lengths[best])))
        self._reserved[slice(*table.reserved_range)] = True
        return start


def _find_gaps(free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where runs of True start, and how long they are; there is one at least."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], free.astype(np.int8), [0]))))
    return edges[::2], edges[1::2] - edges[::2]
