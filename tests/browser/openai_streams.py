"""A small server with the real chat page that plays answers in OpenAI's streaming format.

It stands for servers and models that a tiny model cannot be on purpose: calls bit by bit, torn streams, hostile names.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from anabatic.infer.web.pages import chat_page, load_libraries

DONE = "data: [DONE]\n\n"


def event(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> str:
    """One event of a stream."""
    row = {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more}
    return f"data: {json.dumps(row)}\n\n"


def text(*pieces: str, finish: str = "stop") -> list[Any]:
    """A whole answer in pieces."""
    return [*(event({"content": piece}) for piece in pieces), event(finish=finish), DONE]


def call(index: int | None, *, id: str | None = None, name: str | None = None, arguments: str | None = None) -> str:
    """A piece of a call."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    one = {"index": index, "id": id, "type": "function" if id else None, "function": function}
    return event({"tool_calls": [{key: value for key, value in one.items() if value is not None}]})


@dataclass
class Player:
    """What the server does next.

    Attributes:
        models: names of its models.
        answers: model -> answers; each is a list of pieces of the stream, events to wait for, or an HTTP status.
        asked: bodies of the requests, in the order of their arrival.
    """

    models: list[str] = field(default_factory=lambda: ["one", "two"])
    answers: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def plays(self, model: str, *answers: Any) -> None:
        """Add answers of a model."""
        self.answers[model] += answers

    def asked_of(self, model: str) -> list[dict[str, Any]]:
        """The requests to a model."""
        return [body for body in self.asked if body["model"] == model]


class _Handler(BaseHTTPRequestHandler):
    player: Player

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""

    def _send(self, status: int, kind: str, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        if body:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            data = [{"id": name, "root": name, "max_model_len": 64} for name in self.player.models]
            self._send(200, "application/json", json.dumps({"data": data}).encode())
        elif (bundle := load_libraries()) and self.path == f"/{bundle.path}":
            self._send(200, "text/javascript; charset=utf-8", bundle.content)
        else:
            self._send(200, "text/html; charset=utf-8", chat_page().html.encode(), chat_page().headers)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.player.asked.append(body)
        answer = self.player.answers[body["model"]].popleft()
        if isinstance(answer, int):
            error = json.dumps({"error": {"message": f"status {answer} of {body['model']}"}}).encode()
            self._send(answer, "application/json", error)
            return
        self._send(200, "text/event-stream")
        for piece in answer:
            if isinstance(piece, threading.Event):
                piece.wait(60)
                continue
            try:
                self.wfile.write(piece.encode())
                self.wfile.flush()
            except OSError:
                return  # the page has stopped it


@contextmanager
def playing() -> Iterator[Player]:
    """A server on a free port."""
    player = Player()
    handler = type("Handler", (_Handler,), {"player": player})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    player.url = f"http://127.0.0.1:{server.server_address[1]}/"
    try:
        yield player
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
