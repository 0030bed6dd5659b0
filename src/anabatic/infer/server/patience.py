"""Connections on which no request comes: they are closed, or those that never ask would take all places of a process.

uvicorn waits for the first request of a connection, and for the rest of one that has begun, as long as it takes
(`protocols/http/h11_impl.py`, `httptools_impl.py`); bodies have their own limit, in `gate`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def patient(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, which waits for the head of a request for `seconds` at most."""

    class Patient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        cycle: Any
        waits: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_asked() and self.waits is not None:
                self.waits.cancel()
                self.waits = None
            elif not self._is_asked() and self.waits is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.waits is not None:
                self.waits.cancel()
            super().connection_lost(exc)

        def _is_asked(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            self.waits = asyncio.get_running_loop().call_later(seconds, self._give_up)

        def _give_up(self) -> None:
            self.waits = None
            if not self._is_asked():
                self.transport.close()

    return Patient
