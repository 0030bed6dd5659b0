"""Freed memory, which the allocator keeps."""

from __future__ import annotations

import psutil

from anabatic.core import process_info


def test_freed_memory_goes_back_to_the_system() -> None:
    """A kept block behind each hundred freed ones keeps the heap from shrinking by itself."""
    process = psutil.Process()
    blocks = [bytes(3000) for _ in range(60_000)]
    kept = blocks[::100]
    full = process.memory_info().rss
    del blocks
    process_info.give_back_memory()
    assert process.memory_info().rss < full - 80_000_000 and len(kept) == 600
