"""A served model asked over HTTP: one that echoes log-probabilities, one that does not, one that is not there."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from anabatic.config.chat import Sampling
from anabatic.config.evaluate import EvalJob
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core.errors import ConfigError, Failure
from anabatic.evals.answer_cache import EvalPrompt
from anabatic.evals.endpoint_model import EndpointModel
from anabatic.evals.prefix_trees import ScoredText
from anabatic.infer.remote import json_client
from anabatic.recipes import evaluate

CPU = DeviceConfig(type="cpu", dtype="fp32", threads=1)


@pytest.fixture
def server():
    """Every token has log-probability -token / 10; the likeliest is always number 3."""

    class Handler(BaseHTTPRequestHandler):
        echoes = True
        fails: ClassVar[list[str]] = []

        def log_message(self, *_):
            pass

        def _say(self, code, body):
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self._say(200, {"data": [{"id": "wind"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["model"] == "wind" and asked["temperature"] == 0
            match self.fails.pop() if self.fails else "":
                case "busy":
                    return self._say(503, {})
                case "torn":
                    self.send_response(200)
                    self.send_header("Content-Length", "99")
                    self.end_headers()
                    return self.wfile.write(b"{")
                case "odd":
                    return self._say(200, {"choices": [{"text": None, "logprobs": {"token_logprobs": [None] * 9}}]})
            if asked.get("echo"):
                if not self.echoes:
                    return self._say(400, {"error": {"message": "echo with logprobs is not supported"}})
                ids = [*asked["prompt"], 7]
                told = [None] + [-one / 10 for one in ids[1:]]
                tops = [None] + [{"x": -0.3, "y": -one / 10 if one == 3 else -9.0} for one in ids[1:]]
                return self._say(200, {"choices": [{"logprobs": {"token_logprobs": told, "top_logprobs": tops}}]})
            return self._say(200, {"choices": [{"text": f"{len(asked['prompt'])} tokens {asked.get('stop')}"}]})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_likelihoods_and_replies(server):
    asked = EndpointModel(f"{server[0]}/v1/", None, 100, 2)
    assert asked.model_name == "wind"
    texts = [ScoredText([5, 1, 2, 3], 2), ScoredText([5, 3, 3], 2), ScoredText([4, 9], 1)]
    found = {number: one for part in asked.score_texts(texts, "scoring") for number, one in part.items()}
    assert [found[n].logprob for n in range(3)] == pytest.approx([-0.5, -0.6, -0.9])
    assert [found[n].is_greedy for n in range(3)] == [True, True, False]
    assert [found[n].num_tokens for n in range(3)] == [2, 2, 1]
    replies = dict(
        pair
        for part in asked.generate_replies([EvalPrompt([1, 2]), EvalPrompt([3])], Sampling(stop=["."]), "asking")
        for pair in part.items()
    )
    assert replies == {0: "2 tokens ['.']", 1: "1 tokens ['.']"}


def test_an_endpoint_without_echo_is_refused_for_choices_alone(server, run_folder, tmp_path, capsys):
    server[1].echoes = False
    job = EvalJob(
        model=str(run_folder),
        tasks=["task:spelling#3"],
        endpoint=server[0],
        out=str(tmp_path),
        device=CPU,
    )
    evaluate.run(job)
    written = json.loads((tmp_path / "eval.json").read_text())
    assert written["served"] == "wind" and written["tasks"]["spelling"]["n"] == 3
    asked = EndpointModel(server[0], None, 100, 2)
    with pytest.raises(ConfigError, match="returns no log-probabilities") as caught:
        list(asked.score_texts([ScoredText([1, 2], 1)], "scoring"))
    assert "generative tasks only" in caught.value.hint


def test_what_passes_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(json_client, "RETRY_WAITS", (0.0, 0.0))
    asked = EndpointModel(server[0], None, 100, 1)
    server[1].fails = ["torn", "busy"]
    assert list(asked.generate_replies([EvalPrompt([1, 2])], Sampling(), "asking")) == [{0: "2 tokens None"}]
    server[1].fails = ["busy"] * 3
    with pytest.raises(Failure, match="/v1/completions answers 503"):
        list(asked.generate_replies([EvalPrompt([1, 2])], Sampling(), "asking"))
    server[1].fails = ["torn"] * 3
    with pytest.raises(Failure, match="does not answer: IncompleteRead"):
        list(asked.generate_replies([EvalPrompt([1, 2])], Sampling(), "asking"))
    server[1].fails = ["odd", "odd"]
    with pytest.raises(Failure, match="answers without a text"):
        list(asked.generate_replies([EvalPrompt([1, 2])], Sampling(), "asking"))
    with pytest.raises(ConfigError, match="returns no log-probabilities of a prompt .*: the answer has none"):
        list(asked.score_texts([ScoredText([1, 2], 1)], "scoring"))


def test_nobody_there():
    with pytest.raises(Failure, match="does not answer"):
        EndpointModel("http://127.0.0.1:9", None, 100, 1)
