"""Who may use the studio: names of this machine, requests of its own pages, and a token or a process of the same user.

The studio starts programs, so its address must not be open to other users of the machine, to pages of other sites
(cross-site request forgery) or to foreign names that point at this machine (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import struct
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from anabatic.infer.server.api_errors import ApiError
from anabatic.infer.server.middleware import parse_host_name, read_body, replay_body, require_one_length
from anabatic.infer.web.libraries import PATH_PREFIX

OPEN_PATHS = ("/", "/chat", "/api/login", "/health", "/favicon.ico")
"""Paths without a token: the pages contain no data and ask for the token themselves. So do their libraries."""
MAX_BODY_BYTES = 4 << 20
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SAME_SITE = ("same-origin", "none")


class AccessMiddleware:
    """ASGI middleware around the studio.

    Args:
        token: requests need it, as cookie or `Authorization: Bearer`; empty: none is needed.
        same_user: let in only processes of this user and root, by the owner of their end of the connection.
        hosts: names that requests may have in Host; None: any.
        cookie: name of the cookie with the token.
    """

    def __init__(self, app: ASGIApp, token: str, same_user: bool, hosts: Collection[str] | None, cookie: str) -> None:
        self._app, self._token, self._same_user, self._cookie = app, token, same_user, cookie
        self._hosts = None if hosts is None else {parse_host_name(host) for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _read_headers(scope)
        try:
            require_one_length(scope)
            self._require_host(headers)
            _require_own_page(scope, headers)
            if self._same_user:
                _require_same_user(scope)
            is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(PATH_PREFIX)
            if self._token and not is_open and not self.has_token(headers):
                raise ApiError(
                    401, "the token is missing or wrong; the start of the studio printed it", None, "no_token"
                )
            too_large = ApiError(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB", None, "body_too_large")
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > MAX_BODY_BYTES:
                raise too_large
            body = await read_body(receive, MAX_BODY_BYTES, too_large)
        except ApiError as error:
            await error.to_response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, replay_body(body, receive), send)

    def has_token(self, headers: dict[str, str]) -> bool:
        """Return whether a request carries the token."""
        return any(is_same_text(given, self._token) for given in _list_tokens(headers, self._cookie))

    def _require_host(self, headers: dict[str, str]) -> None:
        host = headers.get("host", "")
        if self._hosts is not None and parse_host_name(host) not in self._hosts:
            hint = "add it with --allowed-hosts NAME"
            raise ApiError(421, f"this server is not called {host[:200]!r}: {hint}", None, "host_not_allowed")


def is_same_text(given: str, expected: str) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _read_headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _list_tokens(headers: dict[str, str], cookie: str) -> list[str]:
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    tokens = [bearer.strip()] if kind.lower() == "bearer" else []
    jar = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:  # another site's cookie on this host
        return tokens
    return [*tokens, jar[cookie].value] if cookie in jar else tokens


def _require_own_page(scope: Scope, headers: dict[str, str]) -> None:
    """Refuse requests that another site's page makes.

    Browsers send Origin with every request that is not a plain GET, and Sec-Fetch-Site with every request to a loopback
    or https address (https://www.w3.org/TR/fetch-metadata/). Programs send neither.
    """
    foreign = ApiError(403, "pages of other sites may not use the studio", None, "foreign_origin")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise foreign
    site = headers.get("sec-fetch-site", "none")
    is_navigation = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
    if site not in _SAME_SITE and not (is_navigation and scope["path"] in OPEN_PATHS):
        raise foreign
    json_body = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
    if scope["method"] not in _SAFE_METHODS and not json_body:
        raise ApiError(415, "send JSON with Content-Type: application/json", None, "not_json")


def _require_same_user(scope: Scope) -> None:
    client, server = scope.get("client"), scope.get("server")
    owner = find_peer_user(tuple(client), tuple(server)) if client and server else None
    if owner not in (0, os.getuid()):
        who = "another user" if owner is not None else "an unknown user"
        raise ApiError(
            403, f"{who} of this machine may not use the studio: start it with --require-token", None, "other_user"
        )


def find_peer_user(client: tuple[str, int], server: tuple[str, int], proc: Path = Path("/proc")) -> int | None:
    """Return the user id that owns the client's end of a connection within this machine; None if it is unknown.

    The kernel lists local connections with their owners (proc(5), /proc/net/tcp).
    """
    wanted = {(pack(client), pack(server)) for pack in (_pack_ipv4, _pack_ipv6)}
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if (fields[1], fields[2]) in wanted:
                return int(fields[7])
    return None


def _pack_ipv4(address: tuple[str, int]) -> str:
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if ip.version == 6:
        ip = ip.ipv4_mapped or ip
    return f"{_format_words(ip.packed)}:{address[1]:04X}"


def _pack_ipv6(address: tuple[str, int]) -> str:
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    packed = ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed
    return f"{_format_words(packed)}:{address[1]:04X}"


def _format_words(packed: bytes) -> str:
    """The kernel prints each 32-bit word of an address, which is in network order, as a number of this machine."""
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))
