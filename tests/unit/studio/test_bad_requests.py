"""Bodies and paths of every kind: an error of the client, and nothing is started or written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from unit.studio.serving import TOKEN, RunningStudio, studio

LONE_HALF = '"\\ud800"'
BODIES = [
    "",
    "null",
    "[]",
    '"text"',
    "{",
    "[" * 100_000,
    '{"command": 1}',
    '{"command": "sft", "text": {}}',
    '{"command": "nope", "text": ""}',
    f'{{"command": {LONE_HALF}, "text": "model: m"}}',
    f'{{"command": "sft", "text": {LONE_HALF}}}',
    '{"command": "sft", "text": "model: \\u0000"}',
    '{"command": "sft", "text": "model: m", "changes": []}',
    '{"command": "sft", "text": "model: m", "changes": {"": {"": 1}}}',
    '{"command": "sft", "text": "&a [*a]"}',
    f'{{"command": "sft", "text": "", "name": {LONE_HALF}}}',
    f'{{"model": {LONE_HALF}, "name": "\\u0000", "text": {LONE_HALF}}}',
    '{"text": "x", "tags": [1]}',
    json.dumps({"command": "sft", "text": 'model: "\\ud800"\ndata: {train: ["\\0", --help]}'}),
    '{"command": "serve", "text": "model: [m]"}',
    '{"command": "studio", "text": ""}',
    '{"model": 1e999}',
    json.dumps({"command": "sft", "text": "x" * (1 << 19)}),
]
PATHS = [
    "/api/recipe",
    "/api/plan",
    "/api/preview",
    "/api/jobs",
    "/api/servers/start",
    "/api/servers/stop",
    "/api/runs/none/note",
    f"/api/jobs/{2**63}/stop",
    "/api/jobs/1/explode",
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStudio]:
    with studio(tmp_path_factory.mktemp("bad")) as one:
        yield one


@pytest.mark.process
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_no_body_is_an_error_of_the_server(running: RunningStudio, path: str, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx2.post(running.url + path, content=body.encode(), headers=headers, timeout=120)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        message = answer.json()["error"]["message"]
        assert message and not re.search(r"(?<!\.)\.\.(?![./])", message), message
    assert running.get("/api/jobs")["jobs"] == [] and running.get("/api/servers")["servers"] == []


@pytest.mark.parametrize("number", [0, 2**31, 2**63 - 1, 2**63, 10**30])
def test_jobs_that_do_not_exist(running: RunningStudio, number: int) -> None:
    for path in (f"/api/jobs/{number}/log", f"/api/jobs/{number}/recipe"):
        assert httpx2.get(running.url + path, timeout=60).status_code == 404
    assert httpx2.get(f"{running.url}/api/jobs/1/log?offset={'9' * 5000}", timeout=60).status_code == 404


@pytest.mark.parametrize("token", [LONE_HALF, '"\\u0000"', "1", "null", "[]", f'"{TOKEN}x"', '"é"'])
def test_tokens_that_are_none(tmp_path: Path, token: str) -> None:
    with studio(tmp_path, token=TOKEN) as one:
        headers = {"Content-Type": "application/json"}
        body = f'{{"token": {token}}}'.encode()
        answer = httpx2.post(f"{one.url}/api/login", content=body, headers=headers, timeout=60)
        assert answer.status_code in (400, 401)
