"""A server that is asked in JSON over HTTP: errors with a hint, and another attempt where the cause may pass."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import Failure

TIMEOUT_SECONDS = 600.0
"""Seconds until an answer."""
API_KEY_VARIABLE = "OPENAI_API_KEY"
RETRY_WAITS = (1.0, 4.0, 16.0)
"""Seconds before a question is asked again: one lost answer of thousands must not cost them all."""
_TEMPORARY_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
"""HTTP codes of what may be over in a moment."""


class RequestFailure(Failure):
    """A server did not do what it was asked.

    Attributes:
        status: its HTTP code; 0: there was no answer.
        said: the beginning of what it answered.
    """

    def __init__(self, message: str, hint: str, status: int = 0, said: str = "") -> None:
        super().__init__(message, hint)
        self.status, self.said = status, said

    @property
    def is_temporary(self) -> bool:
        """True where the same question may be answered later."""
        return self.status in (0, *_TEMPORARY_STATUSES)


@dataclass(frozen=True)
class JsonClient:
    """Asks one server, with the key in `OPENAI_API_KEY` if there is one.

    Attributes:
        url: without a slash, and without `/v1`, at its end.
        waits: seconds before each further attempt of a `POST`; None: `RETRY_WAITS`.
    """

    url: str
    waits: Sequence[float] | None = None
    timeout: float = TIMEOUT_SECONDS

    def get(self, path: str) -> Any:
        """Return what a path answers; whether somebody is there is asked once.

        Raises:
            RequestFailure: nobody answers, or an error.
        """
        return self._send_once(path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send `body` and return the answer: JSON as Python has it, any other text as it is.

        Raises:
            RequestFailure: nobody answers, or an error, at the last attempt as well.
        """
        for wait in RETRY_WAITS if self.waits is None else self.waits:
            try:
                return self._send_once(path, body or {})
            except RequestFailure as error:
                if not error.is_temporary:
                    raise
                time.sleep(wait)
        return self._send_once(path, body or {})

    def _send_once(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                text, kind = answer.read(), answer.headers.get("Content-Type", "")
                return text.decode() if not text or kind.startswith("text/plain") else json_reader.loads(text)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode("utf-8", "replace")[:300]
            hint = f"set {API_KEY_VARIABLE}" if error.code in (401, 403) else "look at the log of the server"
            raise RequestFailure(f"{self.url}{path} answers {error.code}: {said}", hint, error.code, said) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            message = f"{self.url}{path} does not answer: {error or type(error).__name__}"
            raise RequestFailure(message, "look whether the server runs") from error
