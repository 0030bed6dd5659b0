"""What every request passes first: a key where one is asked for, a body that is neither too large nor too slow."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabatic.config.serve import Limits
from anabatic.infer.server.errors import ApiError

OPEN = ("/", "/runs", "/health", "/favicon.ico")
"""Paths without a key: the pages hold no data and ask their reader for one."""


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, limits: Limits, keys: Sequence[str]) -> None:
        self._app, self._limits = app, limits
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it at once."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # uvicorn leaves the body away
            scope = {**scope, "method": "GET"}
        try:
            _require_one_length(scope)
            self._require_key(scope)
            body = await self._body(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _require_key(self, scope: Scope) -> None:
        if not self._keys or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        # Every key is compared, each in a time that does not depend on where they differ.
        fits = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if kind.lower() != b"bearer" or not any(fits):
            raise ApiError(401, "the key is missing or wrong: send Authorization: Bearer KEY", None, "invalid_api_key")

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body; None: the client has gone."""
        most = int(self._limits.body_mib * 2**20)
        told = dict(scope["headers"]).get(b"content-length", b"")
        too_large = ApiError(413, f"the body has more than {self._limits.body_mib:g} MiB", None, "body_too_large")
        if told.isdigit() and int(told) > most:
            raise too_large
        try:
            return await asyncio.wait_for(_read(receive, most, too_large), self._limits.body_seconds)
        except asyncio.TimeoutError as error:
            raise ApiError(408, f"the body took more than {self._limits.body_seconds:g} s") from error


def _require_one_length(scope: Scope) -> None:
    """Refuse a body with two lengths: a proxy may read another end of it than we do (RFC 9112, section 6.3)."""
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        error = ApiError(400, "Content-Length and Transfer-Encoding are both given: give one")
        error.closes = True
        raise error


async def _read(receive: Receive, most: int, too_large: ApiError) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise too_large
        if not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body again, then what the connection says."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
