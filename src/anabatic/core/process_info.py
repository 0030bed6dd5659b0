"""Processes and free memory as /proc shows them, for parts that import no psutil, and the limit of open files."""

from __future__ import annotations

import ctypes
import resource
import subprocess
from pathlib import Path
from typing import Protocol

from anabatic.core.formatting import parse_whole

SIGNAL_DELAY_SECONDS = 1.0
"""Longest wait in one system call of a process that handles signals.

Python runs a handler between two bytecodes (docs.python.org/3/library/signal.html, "Execution of Python signal
handlers"): the handler of a signal that arrives just before a system call blocks runs when that call returns.
"""


class _Waitable(Protocol):
    def wait(self, timeout: float) -> int: ...


def wait_for_exit(process: _Waitable) -> int:
    """Wait for a child and return its exit code; handlers of signals run within `SIGNAL_DELAY_SECONDS`."""
    while True:
        try:
            return process.wait(SIGNAL_DELAY_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def read_process_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (proc(5): 3 state, 4 parent, 14, 15 time, 22 start).

    Empty for a process that is gone, or that has ended and was not waited for: it has given everything back.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    fields = text.rpartition(")")[2].split()
    return [] if not fields or fields[0] in "ZX" else fields


def read_start_time(pid: int) -> int:
    """Return when a process started, in clock ticks after boot; 0: there is none."""
    fields = read_process_fields(pid)
    return int(fields[19]) if fields else 0


def is_alive(pid: int, start_time: int) -> bool:
    """Return whether the process with this id is the one that started then: its id may belong to another by now."""
    return pid > 0 and read_start_time(pid) == start_time != 0


def list_descendants(pid: int) -> list[tuple[int, int]]:
    """Return (id, start time) of every living process below `pid`: children, their children and so on."""
    children: dict[int, list[tuple[int, int]]] = {}
    for folder in Path("/proc").iterdir():
        fields = read_process_fields(folder.name) if parse_whole(folder.name) is not None else []
        if fields:
            children.setdefault(int(fields[1]), []).append((int(folder.name), int(fields[19])))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += [child for child, _ in below]
    return found


def read_available_memory() -> int:
    """Return the bytes that new processes can get without swapping (MemAvailable, proc(5))."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/meminfo has no line MemAvailable")


def give_back_memory() -> None:
    """Give freed memory of this process back to the system, where its allocator keeps it (malloc_trim(3), glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def allow_open_files(count: int) -> int:
    """Raise this process's limit of open files to `count`, as far as the system allows; never lower it. Return it.

    A connection to each of many machines needs more than the usual 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft == resource.RLIM_INFINITY:
        return count
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
