"""Passes OpenAI requests of the chat page to the served models."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from anabatic.core import json_reader
from anabatic.infer.server.api_errors import ApiError
from anabatic_studio.jobs.model_servers import ModelServer, ModelServers

_TIMEOUT_SECONDS = 600.0
_LIST_SECONDS = 5.0
_CHUNK_BYTES = 1 << 16
_KEPT_HEADERS = ("content-type", "retry-after", "cache-control")


async def forward(request: Request, servers: ModelServers) -> Response:
    """Answer a request to /v1/...: the list of all models, or what the server of its model answers.

    Raises:
        ApiError: no model of that name is loaded, or its server does not answer.
    """
    path = request.path_params["path"]
    if path == "models" and request.method == "GET":
        return JSONResponse({"object": "list", "data": await run_in_threadpool(_list_models, servers)})
    body = await request.body()
    server = _find_server(body, servers)
    connection, answer = await run_in_threadpool(_ask, server, request.method, f"/v1/{path}", body, _TIMEOUT_SECONDS)
    headers = {name: value for name, value in answer.getheaders() if name.lower() in _KEPT_HEADERS}
    return StreamingResponse(_iterate_chunks(connection, answer), answer.status, headers=headers)


def _ask(
    server: ModelServer, method: str, path: str, body: bytes, timeout: float
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
        connection.request(method, path, body or None, headers)
        return connection, connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise ApiError(502, f"the server of {server.name} does not answer", None, "model_gone") from error


def _iterate_chunks(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield what arrives, as soon as it arrives; when the model is unloaded meanwhile, an error in OpenAI's shape."""
    try:
        while chunk := answer.read1(_CHUNK_BYTES):
            yield chunk
    except (OSError, http.client.HTTPException):
        gone = ApiError(502, "the model was unloaded before its answer was complete", None, "model_gone")
        yield f"data: {json.dumps(gone.to_body())}\n\n".encode()
    finally:
        connection.close()


def _list_models(servers: ModelServers) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = []
    for row in servers.list_servers():
        if row["state"] != "ready":
            continue
        try:
            connection, answer = _ask(servers.find_server(row["name"]), "GET", "/v1/models", b"", _LIST_SECONDS)
            with closing(connection):
                models += json_reader.loads(answer.read())["data"]
        except (KeyError, ApiError, OSError, ValueError, http.client.HTTPException):
            continue  # it has just ended
    return models


def _find_server(body: bytes, servers: ModelServers) -> ModelServer:
    try:
        name = json_reader.loads(body).get("model")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ApiError(400, "the body is not a JSON object") from error
    try:
        return servers.find_server(name if isinstance(name, str) else "")
    except KeyError as error:
        raise ApiError(404, f"no model {str(name)[:200]!r} is loaded", "model", "model_not_found") from error
