"""Memory of all processes that a program has started, counted from outside: RLIMIT_AS bounds each alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

_ANONYMOUS_DEVICE = b"00:01"
"""The device of memory that processes share without a file, in /proc/PID/maps: of mmap(MAP_SHARED|MAP_ANONYMOUS)."""


def can_list_children() -> bool:
    """Return whether this kernel tells the children of a process (CONFIG_PROC_CHILDREN)."""
    return os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


def list_descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one; those that end meanwhile may be missing."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for task in tasks:
        for child in _read_proc_file(f"/proc/{pid}/task/{task}/children").split():
            yield int(child)
            yield from list_descendants(int(child))


def measure_used_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes that no file backs: what each holds, and all that they share, once.

    What is shared counts with the size of its mapping: after madvise(MADV_DONTNEED) the pages are still there, and
    resident in no process.
    """
    total, shared = 0, dict[bytes, int]()
    for pid in pids:
        kinds = [b"RssAnon:"]
        if maps := _read_proc_file(f"/proc/{pid}/maps"):
            for inode, end in _shared_mappings(maps):
                shared[inode] = max(shared.get(inode, 0), end)
        else:  # it has ended, or this kernel shows it to nobody
            kinds.append(b"RssShmem:")
        lines = _read_proc_file(f"/proc/{pid}/status").splitlines()
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(tuple(kinds)))
    return total + sum(shared.values())


def _shared_mappings(maps: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield inode and last byte of the mappings without a file (proc_pid_maps(5))."""
    for line in maps.splitlines():
        place, _, offset, device, inode, *_ = line.split(maxsplit=5)
        if device == _ANONYMOUS_DEVICE:
            first, _, last = place.partition(b"-")
            yield inode, int(offset, 16) + int(last, 16) - int(first, 16)


def _read_proc_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended
        return b""
