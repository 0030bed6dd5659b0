"""The one thread that calls engines. Requests come to it, and their text goes back to the loop that serves clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from anabatic.core import log
from anabatic.core.errors import AnabaticError
from anabatic.infer.engine import Engine
from anabatic.infer.request import Request


@dataclass(frozen=True)
class TextDelta:
    """New output of a request since the last piece.

    Attributes:
        index: which of the ticket's requests.
        text: certain text, possibly none.
        num_tokens: of the answer so far.
        finish_reason: empty until the end.
    """

    index: int
    text: str
    num_tokens: int
    finish_reason: str


@dataclass(eq=False)
class RequestGroup:
    """Requests that came together, and where their pieces go.

    Attributes:
        deltas: pieces as they come; an exception when nothing more will come.
        first_token_at, last_token_at: when (`time.monotonic`); None before it.
    """

    engine: Engine
    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop
    deltas: asyncio.Queue[TextDelta | Exception] = field(default_factory=asyncio.Queue)
    started_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    last_token_at: float | None = None
    sent_tokens: dict[int, int] = field(default_factory=dict)
    """Index -> tokens that were passed on; -1: finished."""

    @property
    def is_done(self) -> bool:
        """True when every request is finished and told."""
        return all(self.sent_tokens.get(index) == -1 for index in range(len(self.requests)))

    def push_delta(self, piece: TextDelta | Exception) -> None:
        """Hand a piece over to the loop; a loop that has ended wants none."""
        try:
            self.loop.call_soon_threadsafe(self.deltas.put_nowait, piece)
        except RuntimeError:  # asyncio's for a loop that is closed, which it may become at any moment
            if not self.loop.is_closed():
                raise


class EngineWorker(threading.Thread):
    """Steps the engines in turn, as long as one of them is busy."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(name="anabatic-engine", daemon=True)
        self._engines = engines
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._groups: list[RequestGroup] = []
        self.failure: str = ""

    def submit_group(self, group: RequestGroup) -> None:
        """Queue the requests of a ticket. Any thread may call."""
        self._orders.put(lambda: self._admit_group(group))

    def cancel_group(self, group: RequestGroup) -> None:
        """Free what the requests of a ticket hold; nobody waits for them any more. Any thread may call.

        A step that reads for them alone ends at once; another one is short, see `Engine`.
        """
        for request in group.requests:
            request.is_abandoned = True
        self._orders.put(lambda: self._drop_group(group))

    def run_between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function between two steps. Any thread may call."""
        future: Future[Any] = Future()

        def run_order() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # goes to whoever asked
                future.set_exception(error)

        self._orders.put(run_order)
        return future

    def abort_groups(self, engine: Engine, adapter: str | None = None) -> None:
        """End the answers of an engine that are under way, with the tokens so far. Only a function that runs between
        two steps calls this.

        Args:
            adapter: only of those who ask this adapter.
        """
        now = time.monotonic()
        for group in [group for group in self._groups if group.engine is engine]:
            open_requests = [request for request in group.requests if not request.finish_reason]
            if adapter is not None and all(request.adapter != adapter for request in open_requests):
                continue
            engine.cancel_requests(open_requests)
            for request in open_requests:
                request.finish_reason = "abort"
            self._send_deltas(group, now)
            self._groups.remove(group)

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._orders.put(None)

    def run(self) -> None:
        """Work until `stop`."""
        try:
            while self._run_orders():
                for engine in self._engines:
                    if engine.is_busy:
                        self._step_engine(engine)
        except Exception as error:  # a fault of ours: clients get an error, not silence
            log.LOGGER.exception("the thread that answers ended")
            self.failure = f"{type(error).__name__}: {error}"
            for group in self._groups:
                group.push_delta(error)

    def _run_orders(self) -> bool:
        """Follow the orders that wait; without work, wait for one. False: the end."""
        while True:
            try:
                order = self._orders.get(block=not any(engine.is_busy for engine in self._engines))
            except Empty:
                return True
            if order is None:
                return False
            order()

    def _admit_group(self, group: RequestGroup) -> None:
        group.engine.submit(group.requests)
        self._groups.append(group)

    def _drop_group(self, group: RequestGroup) -> None:
        if group in self._groups:
            group.engine.cancel_requests(group.requests)
            self._groups.remove(group)

    def _step_engine(self, engine: Engine) -> None:
        engine_groups = [group for group in self._groups if group.engine is engine]
        try:
            engine.step()
        except AnabaticError as error:
            for group in engine_groups:
                self._drop_group(group)
                group.push_delta(error)
            return
        now = time.monotonic()
        for group in engine_groups:
            self._send_deltas(group, now)
            if group.is_done:
                self._groups.remove(group)

    def _send_deltas(self, group: RequestGroup, now: float) -> None:
        """Hand over what is new of a ticket."""
        for index, request in enumerate(group.requests):
            num_sent, tokens = group.sent_tokens.get(index, 0), len(request.ids)
            if num_sent == -1 or (num_sent == tokens and not request.finish_reason):
                continue
            if group.first_token_at is None:
                group.first_token_at = now
            group.last_token_at = now
            group.sent_tokens[index] = -1 if request.finish_reason else tokens
            group.push_delta(TextDelta(index, request.take_text(), tokens, request.finish_reason))
