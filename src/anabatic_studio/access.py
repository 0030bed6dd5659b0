"""Restrict access to the studio: a request needs its token, under a name of this machine, from a page of its own.

The studio starts programs, so its address must not be open to other users of the machine, to pages of other sites
(cross-site request forgery) or to foreign names that point at this machine (DNS rebinding). The address of who asks
says nothing about who that is: a header can claim another one, and the kernel lists a socket that has been closed as
one of root (`/proc/net/tcp`). Only a secret tells the users of a machine apart.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie

from starlette.types import ASGIApp, Receive, Scope, Send

from anabatic.core.formatting import parse_whole
from anabatic.infer.server.api_errors import ApiError
from anabatic.infer.server.middleware import parse_host_name, read_body, replay_body, require_one_length
from anabatic.infer.web.libraries import PATH_PREFIX

OPEN_PATHS = ("/", "/chat", "/api/login", "/health", "/favicon.ico")
"""Paths without a token: the pages contain no data and ask for the token themselves. So do their libraries."""
MAX_BODY_BYTES = 4 << 20
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SAME_SITE = ("same-origin", "none")


@dataclass(frozen=True)
class LoginCookie:
    """Cookie that a browser gets for the token.

    Browsers send a cookie to every port of a host, so also to another user's server that listens at our port after we
    have ended. It is therefore not the token, and it is worth nothing at the next start.

    Attributes:
        name: of the cookie.
        secret: its value.
    """

    name: str
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)


class AccessMiddleware:
    """ASGI middleware around the studio.

    Args:
        token: requests need it as `Authorization: Bearer`, or a login; empty: none is needed.
        login: the cookie that who gave the token has got.
        hosts: names that requests may have in Host; None: any.
    """

    def __init__(self, app: ASGIApp, token: str, login: LoginCookie, hosts: Collection[str] | None) -> None:
        self._app, self._token, self._login = app, token, login
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
            is_open = scope["path"] in OPEN_PATHS or scope["path"].startswith(PATH_PREFIX)
            if self._token and not is_open and not self._has_secret(headers):
                raise ApiError(
                    401, "the token is missing or wrong; the start of the studio printed it", None, "no_token"
                )
            too_large = ApiError(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB", None, "body_too_large")
            length = headers.get("content-length", "")
            if (parse_whole(length) or 0) > MAX_BODY_BYTES:
                raise too_large
            body = await read_body(receive, MAX_BODY_BYTES, too_large)
        except ApiError as error:
            await error.to_response()(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, replay_body(body, receive), send)

    def _has_secret(self, headers: dict[str, str]) -> bool:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and is_same_text(bearer.strip(), self._token):
            return True
        return is_same_text(_read_cookie(headers, self._login.name), self._login.secret)

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


def _read_cookie(headers: dict[str, str], name: str) -> str:
    jar: SimpleCookie = SimpleCookie()
    try:
        jar.load(headers.get("cookie", ""))
    except CookieError:  # another site's cookie on this host
        return ""
    return jar[name].value if name in jar else ""


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
