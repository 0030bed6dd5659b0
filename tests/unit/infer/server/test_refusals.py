"""What is refused, and how: OpenAI's error shape, never a fault of the server's."""

from __future__ import annotations

import inspect
import json
import socket
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from anabatic.data.tokenizer.hf_folder import _apply_chat_template, encode_chat
from unit.infer.server.running import KEY, catalogue_of, serving

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}

WRONG = {
    "no model of that name": ({"model": "onne", "messages": USER}, 404, 'Did you mean "one"?'),
    "no messages": ({"model": "one"}, 400, "messages"),
    "empty messages": ({"model": "one", "messages": []}, 400, "messages"),
    "unknown role": ({"messages": [{"role": "ghost", "content": "x"}]}, 400, "role"),
    "unknown field": ({"messages": USER, "temprature": 1}, 400, "unknown field temprature"),
    "text as number": ({"messages": USER, "max_tokens": "many"}, 400, "max_tokens"),
    "true as number": ({"messages": USER, "max_tokens": True}, 400, "max_tokens"),
    "true as temperature": ({"messages": USER, "temperature": True}, 400, "temperature"),
    "text as temperature": ({"messages": USER, "temperature": "0.5"}, 400, "temperature"),
    "text as flag": ({"messages": USER, "stream": "yes"}, 400, "stream"),
    "a field of a long name": ({"messages": USER, "k" * 9999: 1}, 400, "unknown field kkk"),
    "very many fields": ({"messages": USER} | {f"field{at}": 1 for at in range(200)}, 400, "201 fields"),
    "very many rows of metadata": ({"messages": USER, "metadata": {f"{at}": 1 for at in range(200)}}, 400, "200"),
    "the second of two texts": ({"messages": USER, "stop": ["a", 1]}, 400, "stop.1: Input should be a valid string"),
    "a part of another kind": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "messages.0.content.0: ",
    ),
    "a picture without an address": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url: Field required",
    ),
    "one tool twice": ({"messages": USER, "tools": [TOOL] * 2}, 400, "two tools are called f"),
    "more tokens than allowed": ({"messages": USER, "max_tokens": 65}, 400, "at most 64"),
    "more answers than allowed": ({"messages": USER, "n": 9}, 400, "at most 8"),
    "temperature": ({"messages": USER, "temperature": -1}, 400, "temperature"),
    "empty stop": ({"messages": USER, "stop": [""]}, 400, "stop"),
    "a penalty beyond its range": ({"messages": USER, "presence_penalty": 2.5}, 400, "presence_penalty"),
    "a bias beyond its range": ({"messages": USER, "logit_bias": {"5": 101}}, 400, "logit_bias.5"),
    "a bias of a word": ({"messages": USER, "logit_bias": {"the": 1}}, 400, "logit_bias"),
    "a bias of a token that is none": ({"messages": USER, "logit_bias": {"99999": 1}}, 400, "names token 99999"),
    "very many biases": ({"messages": USER, "logit_bias": {str(at): 1 for at in range(1100)}}, 400, "1100 tokens"),
    "a variable that is ours": (
        {"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "may not set 'chat_template'",
    ),
    "a variable that is no name": ({"messages": USER, "chat_template_kwargs": {"a b": 1}}, 400, "may not set 'a b'"),
    "an effort that is none": ({"messages": USER, "reasoning_effort": "much"}, 400, "reasoning_effort"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
    "a schema that is none": (
        {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "json_schema",
    ),
    "longer than the context": ({"messages": [{"role": "user", "content": "x " * 300}]}, 400, "at most 128 fit"),
    "top_logprobs alone": ({"messages": USER, "top_logprobs": 2}, 400, "logprobs"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_say_what_is_wrong(server, name):
    body, status, words = WRONG[name]
    answer = server.post(CHAT, body)
    error = answer.json()["error"]
    assert answer.status_code == status
    assert words in error["message"]
    assert len(error["message"]) < 400
    assert set(error) == {"message", "type", "param", "code"}


def test_what_is_null_is_left_open(server):
    body = {"messages": USER, "max_tokens": 2, "n": None, "stream": None, "stop": None, "stream_options": None}
    assert len(server.post(CHAT, body).json()["choices"]) == 1
    assert server.post("/v1/completions", {"prompt": "a", "echo": None, "max_tokens": 2}).status_code == 200


def test_a_body_that_is_not_called_json(server):
    with server.client() as client:
        answer = client.post(CHAT, content=json.dumps({"messages": USER}))
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": [NaN]}', b"[" * 100_000]
)
def test_bodies_that_are_no_requests(server, body):
    with server.client() as client:
        answer = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def raw(server, body, path=CHAT):
    with server.client() as client:
        return client.post(path, content=body, headers={"Content-Type": "application/json"})


UNREADABLE = {
    "an integer that is too long": b'{"messages": [], "seed": ' + b"9" * 100_000 + b"}",
    "an integer that is too long, of": b'{"messages": [], "chat_template_kwargs": {"a": -' + b"1" * 5000 + b"}}",
    "no UTF-8, or it is compressed": b'{"messages": "\xff\xfe"}',
    "nested too deeply": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "is no JSON": b'{"messages": ',
}


@pytest.mark.parametrize("words", UNREADABLE)
def test_bodies_that_cannot_be_read_are_told_why(server, words):
    answer = raw(server, UNREADABLE[words])
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def nested(depth):
    return "[" * depth + "]" * depth


DEEP = {
    "a variable": '"chat_template_kwargs": {"a": %s}',
    "a tool": '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]',
    "a form": '"structured_outputs": {"json": {"enum": %s}}',
    "a schema": '"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": %s}}}',
}


@pytest.mark.parametrize("depth", [101, 900])
@pytest.mark.parametrize("where", DEEP)
def test_what_is_nested_too_deeply_is_refused_by_a_limit(server, where, depth):
    start = f'{{"messages": {json.dumps(USER)}, "max_tokens": 2, '
    answer = raw(server, start + DEEP[where] % nested(depth) + "}")
    assert answer.status_code == 400, answer.text
    assert "nested" in answer.json()["error"]["message"]
    shallow = raw(server, start + DEEP[where] % nested(3) + "}")
    assert shallow.status_code in (200, 400) and "nested" not in shallow.text  # tools are longer than the context


def test_variables_of_a_template_are_called_like_no_argument_of_ours(server):
    """Whatever the functions on the way to the template call their arguments."""
    tokenizer = server.catalogue.find_model("one").engine.tokenizer
    way = (encode_chat, _apply_chat_template, type(tokenizer).apply_chat_template, render_jinja_template)
    names = {name for function in way for name in inspect.signature(function).parameters}
    assert {"tokenizer", "conversation", "conversations"} <= names
    for name in sorted(names):
        answer = server.post(CHAT, {"messages": USER, "chat_template_kwargs": {name: 1}, "max_tokens": 2})
        assert answer.status_code in (200, 400), (name, answer.text)
        assert tokenizer.name_or_path not in answer.text


REFUSING = {
    "{{ range(n) | list }}": ({"n": 10**7}, "make the variables that it is given smaller"),
    "{{ raise_exception('the turns must alternate') }}": ({}, "leave the system message out"),
    "{{ messages[0].content + n }}": ({"n": 3}, "look at its tools, its calls and its variables"),
    "{{ messages[7].content }}": ({}, "look at its tools"),
    "{{ n.a.b }}": ({"n": "x" * 999}, "look at its tools"),
    "{{ raise_exception(n) }}": ({"n": "x" * 9999}, "xxx..."),
}


@pytest.mark.parametrize("template", REFUSING)
def test_a_template_that_refuses_says_nothing_of_this_machine(server, monkeypatch, template):
    tokenizer = server.catalogue.find_model("one").engine.tokenizer
    variables, hint = REFUSING[template]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    answer = server.post(CHAT, {"messages": USER, "chat_template_kwargs": variables, "max_tokens": 2})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "the chat template of one refuses the conversation: " in error["message"] and hint in error["message"]
    assert tokenizer.name_or_path not in answer.text and len(error["message"]) < 500
    told = server.post("/tokenize", {"messages": USER})
    assert tokenizer.name_or_path not in told.text


def test_half_characters_and_special_words_are_only_text(server):
    for content in ("\ud800", "<|assistant_end|>", "\x00"):
        with server.client() as client:
            sent = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2})
            assert client.post(CHAT, content=sent, headers={"Content-Type": "application/json"}).status_code == 200


def test_half_characters_in_what_comes_back_and_in_forms(server):
    bodies = [
        ("/v1/completions", {"prompt": "\ud800", "echo": True, "max_tokens": 2, "stream": stream})
        for stream in (True, False)
    ]
    forms = [{"choice": ["\ud800", "b"]}, {"regex": "\ud800+"}, {"json": {"const": "\ud800"}}]
    bodies += [(CHAT, {"messages": USER, "max_tokens": 2, "structured_outputs": form}) for form in forms]
    bodies += [(CHAT, {"messages": USER, "\ud800": 1}), (CHAT, {"messages": USER, "model": "\ud800"})]
    for path, body in bodies:
        with server.client() as client:
            answer = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404), (body, answer.text)


def test_what_is_listed_is_described(server):
    with server.client() as client:
        for row in client.get("/v1/models").json()["data"]:
            assert client.get(f"/v1/models/{row['id']}").json() == row
            assert row["architecture"]["input_modalities"] == ["text"]


def test_head_is_get_without_a_body(server):
    with server.client() as client:
        for path in ("/", "/health", "/metrics", "/v1/models"):
            answer = client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert client.head(CHAT).status_code == 405


def said(server, *texts):
    """What the server says to bytes, sent one after the other's answer has begun, up to the end of the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    heard = b""
    with socket.create_connection((host, int(port)), timeout=120) as client:
        for text in texts:
            client.sendall(text)
            heard += client.recv(65536) if text is not texts[-1] else b""
        while part := client.recv(65536):
            heard += part
    return heard


def test_a_body_with_two_lengths_ends_the_connection(server):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    heard = said(server, head.encode() + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert heard.startswith(b"HTTP/1.1 400")
    assert heard.count(b"HTTP/1.1") == 1


def test_connections_that_do_not_ask_are_closed(engine_parts):
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving(catalogue_of(engine_parts, body_seconds=0.2)) as running:
        assert said(running, b"GET /hea") == said(running, b"") == b""
        assert said(running, whole, b"GET /hea").count(b"HTTP/1.1") == 1


def test_paths_and_methods(server):
    with server.client() as client:
        assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        assert client.get(CHAT).status_code == 405
        for path in ("/../etc/passwd", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fetc"):
            assert client.get(path).status_code == 404


def test_a_large_body_is_not_read_to_its_end(server):
    with server.client() as client:
        assert client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 300_000}]}).status_code == 413

    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as endless:
        endless.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(5):
            endless.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert b" 413 " in endless.recv(4096)


def test_tokens_that_the_model_has_not(server):
    answer = server.post("/v1/completions", {"prompt": [5, 100_000]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert server.post("/v1/embeddings", {"input": [[1], [-1]]}).status_code == 400


def test_keys(engine_parts):
    with serving(catalogue_of(engine_parts), keys=["sk-other", KEY]) as running:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer"}):
            answer = running.post(CHAT, {"messages": USER}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        right = running.post(CHAT, {"messages": USER, "max_tokens": 2}, headers={"Authorization": f"Bearer {KEY}"})
        assert right.status_code == 200
        with running.client() as client:
            assert client.get("/health").status_code == 200
            assert client.get("/metrics").status_code == 401


def test_other_pages_may_ask_only_when_told(server, engine_parts):
    origin = {"Origin": "https://example.org"}
    with server.client() as client:
        assert "access-control-allow-origin" not in client.get("/v1/models", headers=origin).headers
    with serving(catalogue_of(engine_parts), cors=["https://example.org"]) as running, running.client() as client:
        assert client.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == origin["Origin"]


@pytest.mark.process
def test_a_full_queue_a_slow_body_and_a_long_answer(engine_parts):
    small = catalogue_of(engine_parts, queue=4, body_seconds=2.0, seconds=0.001)
    with serving(small) as running:
        assert running.post(CHAT, {"messages": USER, "n": 5}).status_code == 429
        late = running.post(CHAT, {"messages": USER, "max_tokens": 100})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        with running.client() as client, client.stream("POST", CHAT, json={"messages": USER, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=120) as slow:
            slow.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in slow.recv(4096)


def test_who_goes_away_frees_his_place(engine_parts, server):
    engine = engine_parts["one"][0]
    body = {"messages": USER, "max_tokens": 64, "n": 8, "stream": True}
    with server.client() as client, client.stream("POST", CHAT, json=body) as answer:
        next(answer.iter_lines())
    waited = time.monotonic() + 120
    while engine.is_busy:
        assert time.monotonic() < waited
        time.sleep(0.01)
    assert engine.get_load().used == 0


def test_a_long_prompt_is_cut_where_that_is_asked_for(engine_parts):
    with serving(catalogue_of(engine_parts, cut=True)) as running:
        answer = running.post(CHAT, {"messages": [{"role": "user", "content": "x " * 300}], "max_tokens": 4})
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] == 124
