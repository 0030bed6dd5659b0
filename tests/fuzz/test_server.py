"""Bodies of requests: whatever a client sends, the server answers, and never with its own fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from anabatic.config.chat import Sampling
from anabatic.config.serve import ServerLimits
from anabatic.infer.engine import Engine
from anabatic.infer.server.app import create_app
from anabatic.infer.server.engine_worker import EngineWorker
from anabatic.infer.server.model_registry import ModelRegistry, ServedModel
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from fuzz.engine import Good
from fuzz.reading import Reader, faults
from fuzz.rows_readers import CALL, TOOLS

TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{}"}}]},
    {"role": "tool", "content": "2", "tool_call_id": "a"},
    {"role": "user", "content": "and 2?"},
]
BODIES: dict[str, list[dict[str, Any]]] = {
    "v1/chat/completions": [
        {"model": "one", "messages": TURNS, "max_tokens": 2, "temperature": 0.5, "n": 1, "seed": 1, "top_p": 0.9,
         "logprobs": True, "top_logprobs": 2, "stop": ["x"], "tools": TOOLS, "tool_choice": "auto"},
        {"model": "one", "messages": TURNS[-1:], "max_completion_tokens": 2, "stream": True,
         "stream_options": {"include_usage": True}},
    ],
    "v1/completions": [
        {"model": "one", "prompt": ["a", "b"], "max_tokens": 2, "echo": True, "stop": "\n"},
        {"model": "one", "prompt": [1, 2, 3], "max_tokens": 1},
    ],
    "v1/embeddings": [{"model": "one", "input": ["a", "b"], "encoding_format": "base64"}],
    "v1/classify": [{"model": "one", "input": ["a"]}],
    "tokenize": [{"model": "one", "messages": TURNS}, {"model": "one", "prompt": "a b"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The application over one tiny model; answers have two tokens."""
    tokenizer = build_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    model = build_random_model(len(tokenizer), max_len=1024)
    served = ServedModel("one", Engine(model, tokenizer, max_batch=4, max_len=1024), model)
    sampling = Sampling(temperature=0.0, max_new_tokens=2)
    catalogue = ModelRegistry([served], {}, sampling, ServerLimits(body_mib=0.25, new_tokens=4, answers=2), False)
    worker = EngineWorker(catalogue.engines)
    worker.start()
    yield create_app(catalogue, worker, (), ())
    worker.stop()
    worker.join(30)
    assert not worker.failure


async def _ask(app: Any, path: str, body: bytes) -> int:
    """Ask an ASGI application; return the status of its answer."""
    status: list[int] = []
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"host", b"127.0.0.1"),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": f"/{path}",
        "raw_path": f"/{path}".encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await app(scope, receive, send)
    return status[0]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", BODIES)
def test_bodies(app: Any, path: str, tmp_path: Path) -> None:
    good = [Good(f"{at}.json", json.dumps(body).encode(), "json") for at, body in enumerate(BODIES[path])]

    def read(file: Path) -> None:
        status = asyncio.run(_ask(app, path, file.read_bytes()))
        assert status < 500, status

    if path != "v1/classify":  # there is no classifier here
        for one in good:
            assert asyncio.run(_ask(app, path, one.data)) == 200, one
    found = faults(Reader(path, lambda: good, read, 100), tmp_path)
    assert not found, "not an answer:\n  " + "\n  ".join(found)
