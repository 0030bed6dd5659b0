"""Checks that every request passes first: a name of this machine, a key where one is asked for, a body that is
neither too large nor too slow.

The name is looked at against DNS rebinding: a page of a foreign site whose name has been pointed at 127.0.0.1 asks
with that name in Host, and what is bound to this machine alone must not answer it.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabatic.config.serve import ServerLimits
from anabatic.core import process_info
from anabatic.core.formatting import parse_whole
from anabatic.infer.server.api_errors import ApiError
from anabatic.infer.server.request_limits import CURRENT_LIMITS
from anabatic.infer.web.libraries import PATH_PREFIX

KEYLESS_PATHS = ("/", "/health", "/favicon.ico")
"""Paths without a key: the pages hold no data and ask their reader for one. Their libraries need none either."""

QUIET_SECONDS = 5.0
"""Seconds without a request after which memory that requests took is given back to the system."""

HEALTH_PATH = "/health"
"""Answered under any name: probes ask by an address."""


class GuardMiddleware:
    """ASGI middleware around the whole application.

    Args:
        hosts: names that requests may have in Host and Origin; None: any.
        origins: that may ask besides (CORS); `*`: any.
        seen: called with the status of every answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerLimits,
        keys: Sequence[str],
        hosts: Collection[str] | None = None,
        origins: Collection[str] = (),
        seen: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._app, self._limits, self._on_status = app, limits, seen
        self._keys = [key.encode() for key in keys]
        self._hosts = None if hosts is None else {parse_host_name(host) for host in hosts}
        self._origins = set(origins)
        self._under_way = 0
        self._quiet_timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it at once."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # until an answer has begun: what fails before is answered around us

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._under_way += 1
        if self._quiet_timer is not None:
            self._quiet_timer.cancel()
        try:
            await self._check_and_forward(scope, receive, send_and_record)
        finally:
            self._on_status(status)
            self._under_way -= 1
            if not self._under_way:
                loop = asyncio.get_running_loop()
                self._quiet_timer = loop.call_later(
                    QUIET_SECONDS, loop.run_in_executor, None, process_info.give_back_memory
                )

    async def _check_and_forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":  # uvicorn leaves the body away
            scope = {**scope, "method": "GET"}
        CURRENT_LIMITS.set(self._limits)
        try:
            require_one_length(scope)
            self._require_host(scope)
            self._require_key(scope)
            body = await self._read_body(scope, receive)
        except ApiError as error:
            await error.to_response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, replay_body(body, receive), send)

    def _require_host(self, scope: Scope) -> None:
        if self._hosts is None or scope["path"] == HEALTH_PATH:
            return
        for name, value in scope["headers"]:
            text = value.decode("latin-1")
            if name == b"host" and parse_host_name(text) not in self._hosts:
                hint = "give --allowed-hosts NAME"
                raise ApiError(421, f"this server is not called {text[:200]!r}: {hint}", None, "host_not_allowed")
            if name == b"origin" and not self._is_origin_allowed(text):
                message = f"pages of {text[:200]!r} may not ask: give --cors ORIGIN"
                raise ApiError(403, message, None, "origin_not_allowed")

    def _is_origin_allowed(self, origin: str) -> bool:
        if {origin, "*"} & self._origins:
            return True
        return self._hosts is None or parse_host_name(origin.partition("://")[2]) in self._hosts

    def _require_key(self, scope: Scope) -> None:
        is_keyless = scope["path"] in KEYLESS_PATHS or scope["path"].startswith(PATH_PREFIX)
        if not self._keys or is_keyless or scope["method"] == "OPTIONS":
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        # Every key is compared, each in a time that does not depend on where they differ.
        fits = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if kind.lower() != b"bearer" or not any(fits):
            raise ApiError(401, "the key is missing or wrong: send Authorization: Bearer KEY", None, "invalid_api_key")

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body; None: the client has gone."""
        max_bytes = int(self._limits.body_mib * 2**20)
        content_length = dict(scope["headers"]).get(b"content-length", b"")
        too_large = ApiError(413, f"the body has more than {self._limits.body_mib:g} MiB", None, "body_too_large")
        if (parse_whole(content_length) or 0) > max_bytes:
            raise too_large
        try:
            return await asyncio.wait_for(read_body(receive, max_bytes, too_large), self._limits.body_seconds)
        except asyncio.TimeoutError as error:
            raise ApiError(408, f"the body took more than {self._limits.body_seconds:g} s") from error


def parse_host_name(host: str) -> str:
    """Return a name or an address without its port."""
    try:
        name = urlsplit(f"//{host.strip()}").hostname
    except ValueError:  # brackets that are not closed
        return ""
    return (name or "").rstrip(".")


def require_one_length(scope: Scope) -> None:
    """Refuse a body with two lengths: a proxy may read another end of it than we do (RFC 9112, section 6.3)."""
    names = {name for name, _ in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        error = ApiError(400, "Content-Length and Transfer-Encoding are both given: give one")
        error.closes_connection = True
        raise error


async def read_body(receive: Receive, max_bytes: int, too_large: ApiError) -> bytes | None:
    """Return the body of a request; None: the client has disconnected.

    Raises:
        ApiError: `too_large`.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise too_large
        if not message.get("more_body"):
            return b"".join(parts)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that gives the body again, then the messages of the connection."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
