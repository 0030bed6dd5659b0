"""Connections on which no request comes: they are closed, or those that never ask would take all places of a process.

uvicorn waits for the first request of a connection, and for the rest of one that has begun, as long as it takes
(`protocols/http/h11_impl.py`, `httptools_impl.py`); bodies have their own limit, in `gate`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def make_protocol_class(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, which waits for the head of a request for `seconds` at most."""

    class IdleTimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        cycle: Any
        idle_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._has_request() and self.idle_timer is not None:
                self.idle_timer.cancel()
                self.idle_timer = None
            elif not self._has_request() and self.idle_timer is None:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.idle_timer is not None:
                self.idle_timer.cancel()
            super().connection_lost(exc)

        def _has_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _start_timer(self) -> None:
            self.idle_timer = asyncio.get_running_loop().call_later(seconds, self._close_if_idle)

        def _close_if_idle(self) -> None:
            self.idle_timer = None
            if not self._has_request():
                self.transport.close()

    return IdleTimeoutProtocol
