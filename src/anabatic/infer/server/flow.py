"""From requests to a response: whole or streamed, given up when the client goes or the time is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from anabatic.core.errors import AnabaticError
from anabatic.infer.request import Completion, Request
from anabatic.infer.server.admission import Admission
from anabatic.infer.server.answers import Teller
from anabatic.infer.server.errors import ApiError, from_ours
from anabatic.infer.server.metrics import Metrics
from anabatic.infer.server.served import Served
from anabatic.infer.server.worker import Piece, Ticket, Worker


class Shape(Protocol):
    """How a request is answered, whole or told bit by bit."""

    def whole(self, answers: Sequence[Completion], requests: Sequence[Request], n: int) -> dict[str, Any]:
        """Return the object of finished answers."""

    def teller(self, requests: Sequence[Request], n: int, usage: bool) -> Teller:
        """Return what turns pieces into a stream."""


class Gone(Exception):
    """The client has closed the connection."""


@dataclass
class Flow:
    """One request of a client on its way.

    Attributes:
        n: answers to each prompt.
        usage: a stream ends with the counts of tokens.
        seconds: until it is given up.
    """

    worker: Worker
    metrics: Metrics
    admission: Admission
    served: Served
    shape: Shape
    requests: list[Request]
    n: int
    usage: bool
    seconds: float

    def __post_init__(self) -> None:
        self.ticket = Ticket(self.served.engine, self.requests, asyncio.get_running_loop())
        self._end = self.ticket.began + self.seconds
        self._counted = self._left = False

    def enter(self) -> None:
        """Take places in the queue.

        Raises:
            ApiError: 429, it is full.
        """
        try:
            self.admission.enter(self.served.engine, len(self.requests))
        except ApiError:
            self.metrics.count(self.served.name, "refused")
            raise
        self.worker.submit(self.ticket)

    async def answer(self, http: HttpRequest) -> Response:
        """Return the whole answer.

        Raises:
            ApiError: the queue is full, it took too long, or the engine failed.
        """
        self.enter()
        watch = asyncio.create_task(self._watch(http))
        try:
            left = len(self.requests)
            while left:
                piece = await self._next()
                left -= bool(piece.finish_reason)
        except ApiError:
            self._count("error")
            raise
        except Gone:
            return Response(status_code=499)  # nobody reads it
        finally:
            watch.cancel()
            self._leave()
        engine = self.served.engine
        answers = [engine.completion(request) for request in self.requests]
        return JSONResponse(self.shape.whole(answers, self.requests, self.n))

    def stream(self) -> StreamingResponse:
        """Return an answer that comes piece by piece, as server-sent events.

        Raises:
            ApiError: 429, the queue is full.
        """
        self.enter()
        return _Stream(self._events(), self._leave)

    async def _events(self) -> AsyncIterator[bytes]:
        teller = self.shape.teller(self.requests, self.n, self.usage)
        try:
            for part in teller.begin():
                yield part
            left = len(self.requests)
            while left:
                piece = await self._next()
                for part in teller.take(piece):
                    yield part
                left -= bool(piece.finish_reason)
            for part in teller.finish():
                yield part
        except ApiError as error:
            self._count("error")
            for part in teller.fault(error):
                yield part

    async def _watch(self, http: HttpRequest) -> None:
        """Wait for the client to go. A stream's client is watched by the response."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.ticket.pieces.put_nowait(Gone())

    async def _next(self) -> Piece:
        """Wait for the next piece."""
        while True:
            left = self._end - time.monotonic()
            if left <= 0:
                self._count("timeout")
                raise ApiError(504, f"the answer took more than {self.seconds:g} s", None, "timeout")
            try:
                piece = await asyncio.wait_for(self.ticket.pieces.get(), left)
            except asyncio.TimeoutError:
                continue
            if isinstance(piece, Gone):
                raise piece
            if isinstance(piece, AnabaticError):
                raise from_ours(piece, 500)
            if isinstance(piece, Exception):
                raise ApiError(500, "the server failed; its log says why")
            return piece

    def _leave(self) -> None:
        if self._left:
            return
        self._left = True
        self.admission.leave(self.served.engine, len(self.requests))
        ends = [request.finish_reason for request in self.requests]
        if not all(ends):
            self.worker.give_up(self.ticket)
        self._count("gone" if not all(ends) else ends[0])

    def _count(self, end: str) -> None:
        if not self._counted:
            self._counted = True
            self.metrics.count(self.served.name, end, self.ticket)


class _Stream(StreamingResponse):
    """A response that is left once, also where its client has gone before the first piece."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()
