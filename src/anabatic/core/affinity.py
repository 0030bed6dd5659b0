"""The cores that this process runs on: told by a launcher, in its own share or, for a while, everywhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

CORES_VARIABLE = "ANABATIC_CORES"
"""Environment variable: the cores of each local rank, `0-3;4-7`."""
_original_cores: set[int] = set()
"""The cores from before `bind_to_cores`."""


def parse_core_list(text: str) -> list[int]:
    """Return the numbers of `0-3,8`, as Linux writes lists of cores (cpuset(7)).

    Raises:
        ValueError: it is no such list.
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def bind_to_cores() -> None:
    """Bind this process, and the threads that it will start, to the cores of its local rank, where a launcher says so.

    Called before libraries start threads: each keeps the cores that its parent has at that moment.
    """
    shares = os.environ.get(CORES_VARIABLE, "").split(";")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank < len(shares) and shares[rank]:
        _original_cores.update(os.sched_getaffinity(0))
        os.sched_setaffinity(0, parse_core_list(shares[rank]))


@contextlib.contextmanager
def use_all_cores() -> Iterator[None]:
    """Let threads that are started meanwhile run on all cores of the job: for what one process does for all."""
    if not _original_cores:
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _original_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
