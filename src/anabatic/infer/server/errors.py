"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Source: platform.openai.com/docs/guides/error-codes and the error objects of openai-python's `_exceptions.py`.
"""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from anabatic.core.errors import AnabaticError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request cannot be answered.

    Attributes:
        status: of HTTP; 4xx: the request is wrong, 5xx: we are.
        param: the field that is wrong.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the object that clients get."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the whole response."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
        return JSONResponse(self.body(), self.status, headers=headers.get(self.status))


def from_ours(error: AnabaticError, status: int = 400, param: str | None = None) -> ApiError:
    """Return one of our errors, its hint included."""
    return ApiError(status, f"{error}. {error.hint}" if error.hint else str(error), param)


def from_validation(error: RequestValidationError) -> ApiError:
    """Return the first thing that is wrong with a body."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {'.'.join(place)}", ".".join(place), "unknown_parameter")
    param = ".".join(place) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param)
