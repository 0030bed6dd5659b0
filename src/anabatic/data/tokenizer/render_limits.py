"""Bounds on the time and the memory of a chat template: jinja's sandbox, in which transformers renders, has none.

A template comes with a model's folder, from strangers: nested loops and doubled texts take as long as they like.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

MAX_RENDER_SECONDS = 10.0
"""Of processor time that a template may take for one conversation."""
MAX_RENDER_BYTES = 1 << 30
"""Bytes of memory that a template may take when it is tried."""


class RenderTimeoutError(Exception):
    """A template has used up its time."""

    def __str__(self) -> str:
        return f"it takes more than {MAX_RENDER_SECONDS:g} s of processor time"


@contextmanager
def limit_render_time() -> Iterator[None]:
    """Bound the processor time of what runs inside; in the main thread alone, where signals arrive.

    Raises:
        RenderTimeoutError: the time is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.thread_time()

    def raise_timeout(_: int, __: FrameType | None) -> None:
        left = MAX_RENDER_SECONDS - (time.thread_time() - started)
        if left <= 0:
            raise RenderTimeoutError
        signal.setitimer(signal.ITIMER_VIRTUAL, left)  # it counts the other threads of the process, too

    before = signal.signal(signal.SIGVTALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_RENDER_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def limit_render_resources() -> Iterator[None]:
    """Bound the memory as well: the address space of the process, in the main thread.

    Raises:
        RenderTimeoutError: the time is over.
        MemoryError: the memory is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = _address_space_bytes()
    max_bytes = used + MAX_RENDER_BYTES
    is_main = threading.current_thread() is threading.main_thread()
    bounds = is_main and used > 0 and (soft == resource.RLIM_INFINITY or max_bytes < soft)
    try:
        if bounds:
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))
        with limit_render_time():
            yield
    finally:
        if bounds:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_bytes() -> int:
    """Return the bytes of this process's address space; 0: not known."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[0]) * resource.getpagesize() if path.is_file() else 0
