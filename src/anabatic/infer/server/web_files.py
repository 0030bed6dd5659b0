"""The answer with the libraries of the chat page: compressed, and kept by browsers for as long as they like."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from anabatic.infer.server.api_errors import ApiError
from anabatic.infer.web import libraries, pages


def respond_library(request: Request) -> Response:
    """Return the file that a path below `libraries.PATH_PREFIX` names.

    Raises:
        ApiError: this server has no such file: the one of another version, or any other name.
    """
    bundle = pages.load_libraries()
    if bundle is None or request.url.path.rpartition(libraries.PATH_PREFIX)[2] != bundle.path.rpartition("/")[2]:
        raise ApiError(404, f"there is nothing at {request.url.path[:200]}")
    tag = f'"{bundle.digest[:32]}"'
    headers = {
        "ETag": tag,
        "Cache-Control": "public, max-age=31536000, immutable",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if tag in [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    content = bundle.content
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        content, headers["Content-Encoding"] = bundle.compressed, "gzip"
    return Response(content, headers=headers, media_type="text/javascript; charset=utf-8")


def _takes_gzip(accepted: str) -> bool:
    codings = [one.replace(" ", "").lower() for one in accepted.split(",")]
    return any(one.partition(";")[0] == "gzip" and not one.endswith((";q=0", ";q=0.0")) for one in codings)
