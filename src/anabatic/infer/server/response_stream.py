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
from anabatic.infer.server.admission import AdmissionControl
from anabatic.infer.server.api_errors import ApiError, from_anabatic_error
from anabatic.infer.server.engine_worker import EngineWorker, RequestGroup, TextDelta
from anabatic.infer.server.model_registry import ServedModel
from anabatic.infer.server.prometheus_metrics import ServerMetrics
from anabatic.infer.server.response_builder import StreamFormatter


class ResponseBuilder(Protocol):
    """Answer a request, as a whole or in pieces."""

    def build_response(self, answers: Sequence[Completion], requests: Sequence[Request], n: int) -> dict[str, Any]:
        """Return the object of finished answers."""

    def make_formatter(self, requests: Sequence[Request], n: int, usage: bool) -> StreamFormatter:
        """Return what turns pieces into a stream."""


class ClientDisconnected(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True)
class ServerParts:
    """What all requests to a server share.

    Attributes:
        timeout_seconds: time limit of a request.
    """

    worker: EngineWorker
    metrics: ServerMetrics
    admission: AdmissionControl
    timeout_seconds: float


@dataclass
class ResponseStream:
    """One request of a client on its way.

    Attributes:
        n: answers to each prompt.
        include_usage: a stream ends with the counts of tokens.
    """

    parts: ServerParts
    model: ServedModel
    builder: ResponseBuilder
    requests: list[Request]
    n: int
    include_usage: bool

    def __post_init__(self) -> None:
        self.worker, self.metrics, self.admission = self.parts.worker, self.parts.metrics, self.parts.admission
        self.group = RequestGroup(self.model.engine, self.requests, asyncio.get_running_loop())
        self._deadline = self.group.started_at + self.parts.timeout_seconds
        self._is_counted = self._has_left = False

    def enter_queue(self) -> None:
        """Take places in the queue.

        Raises:
            ApiError: 429, it is full.
        """
        try:
            self.admission.admit_requests(self.model.engine, len(self.requests))
        except ApiError:
            self.metrics.count_request((self.model.counted_as or self.model.name), "refused")
            raise
        self.worker.submit_group(self.group)

    async def respond_complete(self, http: HttpRequest) -> Response:
        """Return the whole answer.

        Raises:
            ApiError: the queue is full, it took too long, or the engine failed.
        """
        self.enter_queue()
        watch = asyncio.create_task(self._watch_disconnect(http))
        try:
            left = len(self.requests)
            while left:
                piece = await self._next_delta()
                left -= bool(piece.finish_reason)
        except ApiError:
            self._count_end("error")
            raise
        except ClientDisconnected:
            return Response(status_code=499)  # the client has gone
        finally:
            watch.cancel()
            self._leave_queue()
        engine = self.model.engine
        answers = [engine.get_completion(request) for request in self.requests]
        return JSONResponse(self.builder.build_response(answers, self.requests, self.n))

    def respond_streaming(self) -> StreamingResponse:
        """Return an answer that comes piece by piece, as server-sent events.

        Raises:
            ApiError: 429, the queue is full.
        """
        self.enter_queue()
        return _EventStreamResponse(self._iter_events(), self._leave_queue)

    async def _iter_events(self) -> AsyncIterator[bytes]:
        teller = self.builder.make_formatter(self.requests, self.n, self.include_usage)
        try:
            for part in teller.start_stream():
                yield part
            left = len(self.requests)
            while left:
                piece = await self._next_delta()
                for part in teller.format_delta(piece):
                    yield part
                left -= bool(piece.finish_reason)
            for part in teller.finish_stream():
                yield part
        except ApiError as error:
            self._count_end("error")
            for part in teller.fail_stream(error):
                yield part

    async def _watch_disconnect(self, http: HttpRequest) -> None:
        """Wait for the client to go. A stream's client is watched by the response."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self.group.deltas.put_nowait(ClientDisconnected())

    async def _next_delta(self) -> TextDelta:
        """Wait for the next piece."""
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._count_end("timeout")
                raise ApiError(504, f"the answer took more than {self.parts.timeout_seconds:g} s", None, "timeout")
            try:
                piece = await asyncio.wait_for(self.group.deltas.get(), left)
            except asyncio.TimeoutError:
                continue
            if isinstance(piece, ClientDisconnected):
                raise piece
            if isinstance(piece, AnabaticError):
                raise from_anabatic_error(piece, 500)
            if isinstance(piece, Exception):
                raise ApiError(500, "the server failed; its log says why")
            return piece

    def _leave_queue(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        self.admission.release_requests(self.model.engine, len(self.requests))
        ends = [request.finish_reason for request in self.requests]
        if not all(ends):
            self.worker.cancel_group(self.group)
        self._count_end("gone" if not all(ends) else ends[0])

    def _count_end(self, end: str) -> None:
        if not self._is_counted:
            self._is_counted = True
            self.metrics.count_request((self.model.counted_as or self.model.name), end, self.group)


class _EventStreamResponse(StreamingResponse):
    """A response that is left once, also where its client has gone before the first piece."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._leave_queue = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave_queue()
