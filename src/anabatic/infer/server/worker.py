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
class Piece:
    """What came of a request since the last piece.

    Attributes:
        index: which of the ticket's requests.
        text: certain text, possibly none.
        tokens: of the answer so far.
        finish_reason: empty until the end.
    """

    index: int
    text: str
    tokens: int
    finish_reason: str


@dataclass(eq=False)
class Ticket:
    """Requests that came together, and where their pieces go.

    Attributes:
        pieces: pieces as they come; an exception when nothing more will come.
        first_token, last_token: when (`time.monotonic`); None before it.
    """

    engine: Engine
    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | Exception] = field(default_factory=asyncio.Queue)
    began: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    told: dict[int, int] = field(default_factory=dict)
    """Index -> tokens that were told; -1: finished."""

    @property
    def over(self) -> bool:
        """True when every request is finished and told."""
        return all(self.told.get(index) == -1 for index in range(len(self.requests)))

    def put(self, piece: Piece | Exception) -> None:
        """Hand a piece over to the loop; a loop that has ended wants none."""
        try:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        except RuntimeError:  # asyncio's for a loop that is closed, which it may become at any moment
            if not self.loop.is_closed():
                raise


class Worker(threading.Thread):
    """Steps the engines in turn, as long as one of them is busy."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(name="anabatic-engine", daemon=True)
        self._engines = engines
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._tickets: list[Ticket] = []
        self.failure: str = ""

    def submit(self, ticket: Ticket) -> None:
        """Queue the requests of a ticket. Any thread may call."""
        self._orders.put(lambda: self._enter(ticket))

    def give_up(self, ticket: Ticket) -> None:
        """Free what the requests of a ticket hold; nobody waits for them any more. Any thread may call.

        A step that reads for them alone ends at once; another one is short, see `Engine`.
        """
        for request in ticket.requests:
            request.abandoned = True
        self._orders.put(lambda: self._drop(ticket))

    def ask(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function between two steps. Any thread may call."""
        future: Future[Any] = Future()

        def order() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # goes to whoever asked
                future.set_exception(error)

        self._orders.put(order)
        return future

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        self._orders.put(None)

    def run(self) -> None:
        """Work until `stop`."""
        try:
            while self._obey():
                for engine in self._engines:
                    if engine.busy:
                        self._step(engine)
        except Exception as error:  # a fault of ours: clients get an error, not silence
            log.LOGGER.exception("the thread that answers ended")
            self.failure = f"{type(error).__name__}: {error}"
            for ticket in self._tickets:
                ticket.put(error)

    def _obey(self) -> bool:
        """Follow the orders that wait; without work, wait for one. False: the end."""
        while True:
            try:
                order = self._orders.get(block=not any(engine.busy for engine in self._engines))
            except Empty:
                return True
            if order is None:
                return False
            order()

    def _enter(self, ticket: Ticket) -> None:
        ticket.engine.submit(ticket.requests)
        self._tickets.append(ticket)

    def _drop(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            ticket.engine.cancel(ticket.requests)
            self._tickets.remove(ticket)

    def _step(self, engine: Engine) -> None:
        mine = [ticket for ticket in self._tickets if ticket.engine is engine]
        try:
            engine.step()
        except AnabaticError as error:
            for ticket in mine:
                self._drop(ticket)
                ticket.put(error)
            return
        now = time.monotonic()
        for ticket in mine:
            self._tell(ticket, now)
            if ticket.over:
                self._tickets.remove(ticket)

    def _tell(self, ticket: Ticket, now: float) -> None:
        """Hand over what is new of a ticket."""
        for index, request in enumerate(ticket.requests):
            told, tokens = ticket.told.get(index, 0), len(request.ids)
            if told == -1 or (told == tokens and not request.finish_reason):
                continue
            if ticket.first_token is None:
                ticket.first_token = now
            ticket.last_token = now
            ticket.told[index] = -1 if request.finish_reason else tokens
            ticket.put(Piece(index, request.take(), tokens, request.finish_reason))
