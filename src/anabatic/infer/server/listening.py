"""Listening: the socket, the names that are answered, uvicorn's settings, its protocol with a time limit. No torch."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anabatic.config.serve import LOCAL_HOSTS
from anabatic.core import log
from anabatic.core.errors import ConfigError

_LISTEN_BACKLOG = 2048
UNREAD_TIMEOUT_SECONDS = 60.0
"""A client that reads nothing of its answer for this long is disconnected."""
_MAX_HEAD_BYTES = 64 << 10
"""Bytes of the head of a request; a client that sends more without a request is disconnected."""


@contextmanager
def ignore_reraised_signal() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after it has ended by it."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket, opened before models are loaded: clients that connect meanwhile wait.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small parts of an answer at once (TCP_NODELAY) on sockets that say they are TCP: else 44 ms later.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux (tcp(7)); connections take it over from who listens
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_TIMEOUT_SECONDS))
    try:
        listening.bind((host, port))
        listening.listen(_LISTEN_BACKLOG)  # two that are only bound would both have the address
    except (OSError, ValueError, TypeError) as error:  # the latter two: no host can be called so
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{host}:{port} cannot be opened for listening: {reason}", "give another --host or --port"
        ) from error
    return listening


def is_loopback(listening: socket.socket) -> bool:
    """Return whether only this machine reaches a listening socket."""
    return ipaddress.ip_address(str(listening.getsockname()[0]).partition("%")[0]).is_loopback


def allowed_host_names(allowed: list[str], listening: socket.socket) -> list[str] | None:
    """Return the host names that are answered; None: any."""
    address = str(listening.getsockname()[0])
    if "*" in allowed or not (allowed or is_loopback(listening)):
        return None
    return [*LOCAL_HOSTS, f"[{address}]" if ":" in address else address, *allowed]


def make_server_config(app: Any, head_seconds: float, shutdown_seconds: int) -> uvicorn.Config:
    """Return uvicorn's settings for an application.

    Its headers of proxies are off: it believes `X-Forwarded-For` of whatever asks from 127.0.0.1, so every user of the
    machine could choose the address that requests seem to come from. Nothing here needs that address.

    Args:
        app: ASGI application.
        head_seconds: longest time for the head of a request to arrive.
        shutdown_seconds: time that answers under way have after a signal.
    """
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        http=make_protocol_class(head_seconds),
        timeout_graceful_shutdown=shutdown_seconds,
    )


def can_others_read(mode: int) -> bool:
    """Return whether `st_mode` is that of a regular file that other users may read."""
    return stat.S_ISREG(mode) and bool(mode & (stat.S_IRGRP | stat.S_IROTH))


def warn_of_open_secret(path: Path) -> None:
    """Warn of a file of secrets that other users may read."""
    if can_others_read(path.stat().st_mode):
        log.warn(f"{path} can be read by other users of this machine: `chmod 600 {path}`")


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits for the head of a request: the time in which it arrives, and its size.

    The parser in C takes a body in one-byte chunks 20 times as fast as the other one (h11); what arrives together is
    handed on together, so that a body costs by its bytes and not by its chunks.
    """

    head_seconds: float
    cycle: Any
    _idle_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Begin to count the time."""
        super().connection_made(transport)
        self._pieces: list[bytes] = []
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Take what has arrived."""
        super().data_received(data)
        self._hand_on_body()
        self._head_bytes = 0 if self._has_request() else self._head_bytes + len(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self.transport.close()
        if self._has_request() and self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        elif not self._has_request() and self._idle_timer is None:
            self._start_timer()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body until all that has arrived is read."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Hand on the body before its end."""
        self._hand_on_body()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def _hand_on_body(self) -> None:
        if self._pieces:
            super().on_body(b"".join(self._pieces))
            self._pieces.clear()

    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(self.head_seconds, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        if not self._has_request():
            self.transport.close()


def make_protocol_class(seconds: float) -> type[BoundedProtocol]:
    """Return the protocol with a limit of `seconds` for the head of a request to arrive."""
    return type("BoundedProtocol", (BoundedProtocol,), {"head_seconds": seconds})
