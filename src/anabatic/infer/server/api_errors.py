"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Source: platform.openai.com/docs/guides/error-codes and the error objects of openai-python's `_exceptions.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from anabatic.core.errors import AnabaticError, ChatTemplateError

_MAX_ECHO_CHARS = 200
"""Of what a client has written, in a message."""
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "queue_full_error"}


_BODY_STATUSES = (408, 413)
"""Statuses that come while the body is still on its way: its rest is not waited for."""


class ApiError(Exception):
    """A request cannot be answered.

    Attributes:
        status: of HTTP; 4xx: the request is wrong, 5xx: we are.
        param: the field that is wrong.
        code: a word for programs.
        closes_connection: nothing more may come over this connection.
        retry_after: seconds until it is worth asking again; None: by the status.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.closes_connection = status in _BODY_STATUSES
        self.retry_after: int | None = None

    def to_body(self) -> dict[str, Any]:
        """Return the object that clients get."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def to_response(self) -> JSONResponse:
        """Return the whole response."""
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
        closing = {"Connection": "close"} if self.closes_connection else {}
        later = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.to_body(), self.status, headers=headers.get(self.status, {}) | closing | later)


def from_anabatic_error(error: AnabaticError, status: int = 400, param: str | None = None) -> ApiError:
    """Return one of our errors, its hint included."""
    message = str(error).removesuffix(".")
    return ApiError(status, f"{message}. {error.hint}" if error.hint else message, param)


def template_error(error: ChatTemplateError, name: str, param: str) -> ApiError:
    """Return what a chat template has against a conversation; the folder of the model is nobody's business."""
    reason = error.reason if len(error.reason) <= _MAX_ECHO_CHARS else f"{error.reason[:_MAX_ECHO_CHARS]}..."
    return ApiError(400, f"the chat template of {name} refuses the conversation: {reason}. {error.hint}", param)


def describe_unreadable_body(reason: BaseException | None) -> str:
    """Return why a body could not be read as JSON, by what reading it ended in."""
    if isinstance(reason, RecursionError):
        return "the body is nested too deeply"
    if isinstance(reason, UnicodeError):
        return "the body is no UTF-8, or it is compressed: send JSON as it is"
    if isinstance(reason, ValueError):  # all that is left: Python's bound for whole numbers
        return "the body holds an integer that is too long, of thousands of digits"
    return "the body cannot be read as JSON"


def from_validation_error(error: RequestValidationError) -> ApiError:
    """Return the first thing that is wrong with a body."""
    first = _closest_error(error.errors())
    param = ".".join(str(part) for part in _field_path(first))[:_MAX_ECHO_CHARS] or None
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if tuple(first["loc"]) == ("body",) and first["type"] != "value_error":
        return ApiError(400, "the body is no JSON object, or is not sent with Content-Type: application/json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {param}", param, "unknown_parameter")
    return ApiError(400, f"{param}: {message}" if param else message, param)


def _closest_error(errors: Sequence[Any]) -> Any:
    """Return the first error; of a field that has several forms, that of the form which fits best."""
    first = errors[0]
    *field, form = first["loc"]
    if not _is_union_member(form):
        return first
    others = [one for one in errors if list(one["loc"][: len(field)]) == field]

    def rank_fit(one: Any) -> tuple[bool, int, int]:
        last = one["loc"][-1]
        return not one["type"].endswith("_type"), len(one["loc"]), last if isinstance(last, int) else 0

    return max(others, key=rank_fit)


def _field_path(error: Any) -> list[int | str]:
    """Return where an error is, as the client has written it."""
    if error["loc"][0] == "path":
        return list(error["loc"][1:])
    *above, last = error["loc"]
    known = [part for part in above if not _is_union_member(part)]
    return (known if _is_union_member(last) and error["type"] != "extra_forbidden" else [*known, last])[1:]


def _is_union_member(part: int | str) -> bool:
    """True for what pydantic calls one of several forms of a field, which is no name of a client's."""
    return isinstance(part, str) and ("[" in part or part in ("NamedTool", "FlatChoice"))
