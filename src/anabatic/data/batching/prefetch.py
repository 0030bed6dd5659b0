"""Reading ahead in a background thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class _PrefetchQueue(Generic[T]):
    """State that the threads share. It does not know the `PrefetchIterator`, so a forgotten one can be collected."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.items: deque[T] = deque()
        self.changed = threading.Condition()
        self.is_closed = False
        self.is_finished = False
        self.error: BaseException | None = None

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.items.clear()
            self.changed.notify_all()

    def mark_finished(self, error: BaseException | None) -> None:
        with self.changed:
            self.is_finished, self.error = True, error
            self.changed.notify_all()

    def put_item(self, item: T) -> bool:
        """Wait for room and add `item`; False once the channel is closed."""
        with self.changed:
            while len(self.items) >= self.depth and not self.is_closed:
                self.changed.wait()
            if self.is_closed:
                return False
            self.items.append(item)
            self.changed.notify_all()
            return True


def _read_ahead(items: Iterable[T], channel: _PrefetchQueue[T]) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not channel.put_item(item):
                break
    except BaseException as raised:  # handed to the consumer, who raises it
        error = raised
    channel.mark_finished(error)


class PrefetchIterator(Generic[T]):
    """Read `items` up to `depth` ahead in a background thread.

    An exception of the iterator is raised by `next()` after the items before it. `close()` stops and joins
    the thread; it is called by leaving the `with` block and by the garbage collector.
    """

    def __init__(self, items: Iterable[T], depth: int, name: str = "prefetch") -> None:
        self._channel: _PrefetchQueue[T] = _PrefetchQueue(max(1, depth))
        arguments = (items, self._channel)
        self._thread = threading.Thread(target=_read_ahead, args=arguments, name=name, daemon=True)
        self._finalizer = weakref.finalize(self, self._channel.close)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        channel = self._channel
        with channel.changed:
            while not (channel.items or channel.is_finished or channel.is_closed):
                channel.changed.wait()
            if channel.items:
                item = channel.items.popleft()
                channel.changed.notify_all()
                return item
            if channel.error is not None and not channel.is_closed:
                raise channel.error
            raise StopIteration

    def close(self) -> None:
        """Stop reading ahead and wait for the thread."""
        self._channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> PrefetchIterator[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
