"""Requests made from the server's own OpenAPI document, right ones and wrong ones: never a fault of the server's."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/classify", "/tokenize"]
MODES = list(schemathesis.GenerationMode)
REFUSED = {400, 404, 405, 408, 413, 429}
"""Statuses of requests that are wrong, or come at a wrong time."""


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_path_with_a_body_is_asked(schema):
    assert set(PATHS) == {path for path in schema if "post" in list(schema[path])}


@pytest.mark.process
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", PATHS)
def test_what_the_document_allows_and_what_it_does_not(schema, path, mode):
    cases = schema[path]["POST"].as_strategy(generation_mode=mode)

    @settings(max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def ask(data):
        case = data.draw(cases)
        answer = case.call(timeout=60)
        told = f"{case.as_curl_command()}\n{answer.status_code} {answer.text[:300]}"
        if answer.status_code == 200:
            return
        assert answer.status_code in REFUSED, told
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, told

    ask()
