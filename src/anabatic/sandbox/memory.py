"""Memory of all processes that a program has started, counted from outside: RLIMIT_AS bounds each alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

_KINDS = (b"RssAnon:", b"RssShmem:")
"""What a process holds that is no file's (proc_pid_status(5))."""


def can_count() -> bool:
    """Return whether this kernel tells the children of a process (CONFIG_PROC_CHILDREN)."""
    return os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one; those that end meanwhile may be missing."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for task in tasks:
        for child in _read(f"/proc/{pid}/task/{task}/children").split():
            yield int(child)
            yield from descendants(int(child))


def private_bytes(pid: int) -> int:
    """Return the resident memory of a process that no file stands behind; 0: it has ended."""
    lines = _read(f"/proc/{pid}/status").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_KINDS))


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended
        return b""
