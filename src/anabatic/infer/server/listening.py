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
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from anabatic.config.serve import LOCAL_HOSTS
from anabatic.core import log
from anabatic.core.errors import ConfigError

_LISTEN_BACKLOG = 2048
UNREAD_TIMEOUT_SECONDS = 60.0
"""A client that reads nothing of its answer for this long is disconnected."""


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


def make_protocol_class(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with a limit of `seconds` for the head of a request to arrive."""

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
