"""What one client may take from the others: places, time, names of the server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass

import pytest

from anabatic.config.serve import LOCAL_HOSTS, ServeJob
from anabatic.core.errors import ConfigError
from anabatic.infer.engine import Engine
from anabatic.infer.server.admission import AdmissionControl
from anabatic.infer.server.api_errors import ApiError
from anabatic.infer.server.listening import allowed_host_names, make_protocol_class, open_listening_socket
from anabatic_testing.random_models import build_byte_tokenizer
from unit.infer.scripted import says
from unit.infer.server.running import catalogue_of, serving

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


def figure(running, name):
    with running.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


def until(true):
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def sent(running, path, body, head=""):
    """A connection over which a request has gone out, whose answer nobody has read."""
    host, port = running.url.removeprefix("http://").split(":")
    text = json.dumps(body)
    one = socket.create_connection((host, int(port)), timeout=240)
    fields = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n{head}"
    one.sendall(f"POST {path} HTTP/1.1\r\n{fields}\r\n{text}".encode())
    return one


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_whose_client_has_gone_is_given_up(tmp_path, stream):
    """Tokens come as fast as they can: there is no pause in which the client would be looked for."""
    tokenizer = build_byte_tokenizer(tmp_path)
    model = says(tokenizer, ["a", "b"], max_len=20_000, endless=True)
    engine = Engine(model, tokenizer, max_batch=2, max_len=20_000)
    with serving(catalogue_of({"one": (engine, model)}, new_tokens=19_000)) as running:
        body = {"messages": USER, "max_tokens": 19_000, "stream": stream, "n": 2}
        with sent(running, CHAT, body):
            until(lambda: engine.get_load().new_tokens > 10)
        until(lambda: not engine.is_busy)
        assert engine.get_load().new_tokens < 38_000
        assert figure(running, 'anabatic_requests_total{end="gone",model="one"}') == 1
        assert figure(running, 'anabatic_requests_total{end="length",model="one"}') == 0


FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.2",
    "[",
    "",
]
OWN = ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "localhost.", "inside.example:80"]


def test_a_server_of_this_machine_answers_to_its_names_alone(engine_parts):
    with (
        serving(catalogue_of(engine_parts), hosts=[*LOCAL_HOSTS, "inside.example"]) as running,
        running.client() as client,
    ):
        for host in FOREIGN:
            answer = client.get("/v1/models", headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host_not_allowed"), host
            assert client.get("/", headers={"Host": host}).status_code == 421
        for host in OWN:
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200, host
        assert client.get("/health", headers={"Host": "10.0.0.7:8000"}).status_code == 200
        for origin in ("http://evil.example", "https://evil.example:8000", "null", "http://["):
            answer = client.post(CHAT, json={"messages": USER, "max_tokens": 1}, headers={"Origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), origin
        for origin in (running.url, "http://localhost:3000", "http://[::1]:1"):
            asked = client.post(CHAT, json={"messages": USER, "max_tokens": 1}, headers={"Origin": origin})
            assert asked.status_code == 200, origin


def test_pages_that_cors_names_may_ask_a_server_of_this_machine(engine_parts):
    origin = "https://example.org"
    with serving(catalogue_of(engine_parts), cors=[origin], hosts=LOCAL_HOSTS) as running, running.client() as client:
        assert client.get("/v1/models", headers={"Origin": origin}).status_code == 200
        assert client.get("/v1/models", headers={"Origin": "https://example.net"}).status_code == 403


@pytest.mark.parametrize(
    ("address", "allowed", "expected"),
    [
        ("127.0.0.1", [], {"localhost", "127.0.0.1", "[::1]"}),
        ("127.0.0.1", ["a.example"], {"localhost", "127.0.0.1", "[::1]", "a.example"}),
        ("127.0.0.1", ["*"], None),
        ("0.0.0.0", [], None),
        ("0.0.0.0", ["a.example"], {"localhost", "127.0.0.1", "[::1]", "0.0.0.0", "a.example"}),
    ],
)
def test_the_names_follow_the_address(address, allowed, expected):
    with open_listening_socket(address, 0) as listening:
        names = allowed_host_names(allowed, listening)
    assert (None if names is None else set(names)) == expected


@pytest.mark.parametrize("host", ["", "http://a.example", "a.example/x", "a b"])
def test_names_that_are_none(host):
    with pytest.raises(ConfigError, match="no name of a host"):
        ServeJob(model=["x"], allowed_hosts=[host])


def test_the_cost_of_a_request_is_bounded_before_its_tokens_are_counted(engine_parts, monkeypatch):
    limits = {"messages": 8, "choices": 3, "bytes_per_token": 2, "answers": 4}
    with serving(catalogue_of(engine_parts, cut=True, **limits)) as running:
        tokenizer = running.catalogue.find_model("one").engine.tokenizer
        monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: pytest.fail("tokens are counted"))
        long = [{"role": "user", "content": "你" * 100}]
        tool = {"type": "function", "function": {"name": "f", "description": "x" * 300}}
        empty = {"type": "function", "function": {"name": "f", "parameters": {"x": [{}] * 300}}}
        talks = [USER] * 9
        cases = {
            "messages: 9 messages": (CHAT, {"messages": USER * 9}),
            "messages: 10 messages": ("/tokenize", {"messages": USER * 10}),
            "messages: 9 messages are": ("/v1/classify", {"messages": talks}),
            "the texts have 317 bytes; a context of this model takes 256": (CHAT, {"messages": long}),
            "the texts have 3": (CHAT, {"messages": USER, "tools": [tool]}),
            "the texts have 6": (CHAT, {"messages": USER, "tools": [empty]}),
            "takes 256 bytes at most": ("/v1/completions", {"prompt": "x" * 257}),
            "the texts have 258 bytes": ("/tokenize", {"prompt": "x" * 258}),
            "the texts have 259 bytes": ("/v1/embeddings", {"input": ["a", "x" * 259]}),
            "prompt: 5 answers": ("/v1/completions", {"prompt": ["a"] * 5}),
            "6 answers": ("/v1/completions", {"prompt": ["a"] * 3, "n": 2}),
            "stop has more than 4096": (CHAT, {"messages": USER, "stop": "x" * 5000}),
        }
        for words, (path, body) in cases.items():
            answer = running.post(path, body)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], (words, answer.text)
        refused = running.post(CHAT, {"messages": long}).json()["error"]
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "messages")


def test_forms_are_bounded(engine_parts):
    forms = {
        "choice has 4 texts": {"choice": ["a", "b", "c", "d"]},
        "regex has": {"regex": "a" * 300_000},
        "the schema has": {"json": {"enum": ["a" * 300_000]}},
        "json_schema cannot be used": {"json": {"type": "integer", "maximum": 2**64}},
    }
    with serving(catalogue_of(engine_parts, choices=3)) as running:
        for words, form in forms.items():
            answer = running.post(CHAT, {"messages": USER, "structured_outputs": form})
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_a_full_queue_is_no_fault(engine_parts, caplog):
    with serving(catalogue_of(engine_parts, queue=4)) as running:
        answer = running.post(CHAT, {"messages": USER, "n": 5})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (429, "queue_full_error", "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        assert running.post(CHAT, {"messages": USER, "n": 5, "stream": True}).status_code == 429
        assert figure(running, 'anabatic_requests_total{end="refused",model="one"}') == 2
        assert figure(running, 'anabatic_http_responses_total{status="429"}') == 2
        assert figure(running, 'anabatic_http_responses_total{status="500"}') == 0
        assert running.post(CHAT, {"messages": USER, "max_tokens": 1}).status_code == 200


def test_who_is_let_in_counts_before_the_engine_has_seen_him(engine_parts):
    engine = engine_parts["one"][0]
    admission = AdmissionControl(4)
    admission.admit_requests(engine, 3)
    with pytest.raises(ApiError, match="3 requests wait already") as refused:
        admission.admit_requests(engine, 2)
    assert refused.value.retry_after == 1
    admission.release_requests(engine, 3)
    admission.admit_requests(engine, 4)
    with pytest.raises(ApiError) as refused:
        admission.admit_requests(engine, 1)
    assert 1 <= refused.value.retry_after <= 60


@dataclass
class Clock:
    """Goes when it is told to."""

    now: float = 1000.0

    def __call__(self):
        return self.now


def asked_pause(admission, engine):
    with pytest.raises(ApiError) as refused:
        admission.admit_requests(engine, 1000)
    return refused.value.retry_after


@pytest.mark.parametrize("before", ["a pause", "one at a time", "nothing"])
def test_only_work_counts_as_the_pace_of_a_queue(engine_parts, before):
    engine, clock = engine_parts["one"][0], Clock()
    assert engine.max_batch == 4
    admission = AdmissionControl(64, clock)
    for _ in range(10 if before != "nothing" else 0):
        admission.admit_requests(engine, 1)
        clock.now += 2
        admission.release_requests(engine, 1)
        clock.now += 3600 if before == "a pause" else 0
    admission.admit_requests(engine, 64)
    assert asked_pause(admission, engine) == (1 if before == "nothing" else 16)  # 4 leave in 2 s, 32 in 16
    for _ in range(8):
        clock.now += 2
        admission.release_requests(engine, 4)
        admission.admit_requests(engine, 4)
    assert asked_pause(admission, engine) == 16
    for _ in range(20):
        clock.now += 0.25
        admission.release_requests(engine, 4)
        admission.admit_requests(engine, 4)
    assert asked_pause(admission, engine) == 2
    clock.now += 600
    assert asked_pause(admission, engine) == 60  # nobody leaves any more


def test_what_is_cut_off_is_not_read_to_its_end(engine_parts):
    with serving(catalogue_of(engine_parts, body_seconds=0.5, body_mib=0.1)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        for length, status in ((100, b" 408 "), (10**6, b" 413 ")):
            with socket.create_connection((host, int(port)), timeout=240) as slow:
                slow.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{".encode())
                heard = b""
                while part := slow.recv(65536):
                    heard += part
            assert status in heard and b"connection: close" in heard.lower()


def test_a_body_in_one_byte_chunks_is_the_same_body(engine_parts):
    with serving(catalogue_of(engine_parts)) as running, running.client() as client:
        text = json.dumps({"messages": USER, "max_tokens": 2, "temperature": 0, "user": "x" * 20_000})
        chunks = (text[at : at + 1].encode() for at in range(len(text)))
        whole = client.post(CHAT, content=text, headers={"Content-Type": "application/json"}).json()
        pieces = client.post(CHAT, content=chunks, headers={"Content-Type": "application/json"}).json()
        assert pieces["choices"] == whole["choices"]


def test_pieces_that_arrive_together_are_handed_on_together():
    """A body costs by its bytes: each piece that the application is woken for costs a turn of the loop."""

    class Cycle:
        response_complete, more_body, body = False, True, b""
        message_event = asyncio.Event()

    protocol = make_protocol_class(1.0).__new__(make_protocol_class(1.0))
    protocol.cycle, protocol._pieces, handed = Cycle(), [], []
    protocol.parser = type("Parser", (), {"should_upgrade": lambda self: False})()
    protocol.flow = type("Flow", (), {"pause_reading": lambda self: None})()
    for _ in range(1000):
        protocol.on_body(b"x")
        handed.append(protocol.cycle.body)
    protocol._hand_on_body()
    assert set(handed) == {b""} and protocol.cycle.body == b"x" * 1000 and not protocol._pieces


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 200_000, b"GET /" + b"x" * 200_000])
def test_a_head_without_end_is_cut_off(engine_parts, head):
    with serving(catalogue_of(engine_parts)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as one:
            received = b"?"
            try:
                one.sendall(head)
                received = one.recv(1000)
            except ConnectionError:
                received = b""
        assert received == b""
        with running.client() as client:
            assert client.get("/health").status_code == 200
