"""Inference servers with a real tiny model that speak the routes of vLLM 0.23 and 0.33 and of SGLang, and their faults.

Routes, fields and answers: `vllm/entrypoints` of vLLM 0.23.0 and 0.33.0; `sglang/srt/entrypoints/http_server.py` and
`sglang/srt/managers/io_struct.py` of SGLang 0.5.23.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from transformers import AutoTokenizer

from anabatic.config.chat import Sampling
from anabatic.infer.engine import Engine
from anabatic.models.pretrained import load_model


class HttpFault(Exception):
    """An answer with an error."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status)
        self.status, self.body = status, body


class FakeServer(ABC):
    """A model behind routes.

    Attributes:
        faults: name of a fault -> how often it still happens.
        asked: path -> how often.
        loaded: folders of weights and adapters, in their order.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.faults: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.loaded: list[str] = []
        self.lock = threading.RLock()
        self.is_paused = False
        self._load(folder)

    @abstractmethod
    def answer(self, path: str, body: bytes | None) -> Any:
        """Return what a path answers, or raise `HttpFault`."""

    def fails(self, name: str) -> bool:
        """Whether a fault happens now."""
        with self.lock:
            self.faults[name] -= 1
            return self.faults[name] >= 0

    def _load(self, folder: Path) -> None:
        import torch

        model = load_model(folder, torch.device("cpu"))
        self.engine = Engine(model, self.tokenizer, max_batch=8, max_len=64)

    def generate(self, prompt: list[int], asked: dict[str, Any], stops: list[int], adapter: str | None) -> Any:
        """Return a completion of the engine."""
        sampling = Sampling(top_k=None, **asked)
        with self.lock:
            request = self.engine.request(prompt, sampling, frozenset([*stops, *self.engine.stop_ids]), adapter=adapter)
            self.engine.submit([request])
            while not request.finish_reason:
                self.engine.step()
            return self.engine.get_completion(request)


class FakeVllm(FakeServer):
    """vLLM of one version.

    Args:
        dev: started with VLLM_SERVER_DEV_MODE=1; lora: with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
        listed: it has `/v1/models`.
    """

    def __init__(
        self, folder: Path, version: str = "0.33", dev: bool = True, lora: bool = True, listed: bool = True
    ) -> None:
        super().__init__(folder)
        self.version, self.dev, self.lora, self.listed = version, dev, lora, listed

    def answer(self, path: str, body: bytes | None) -> Any:
        route = urlsplit(path).path
        if route == "/v1/models" and self.listed:
            return {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 64}]}
        if route == "/v1/completions":
            return self._complete(_parse(body))
        if route == "/v1/load_lora_adapter" and self.lora:
            return self._load_adapter(_parse(body))
        if route == "/v1/unload_lora_adapter" and self.lora:
            return f"Success: LoRA adapter '{_parse(body)['lora_name']}' removed successfully."
        commands = {"/pause": self._pause, "/resume": self._resume, "/collective_rpc": self._reload}
        commands["/reset_prefix_cache"] = self._reset_cache
        if not self.dev or route not in commands:
            raise HttpFault(404, {"detail": "Not Found"})
        return commands[route](_parse(body) if route == "/collective_rpc" else {})

    def _complete(self, body: dict[str, Any]) -> Any:
        if self.is_paused or self.fails("busy"):
            raise HttpFault(503, {"error": {"message": "paused", "code": 503}})
        known = {"policy"} | set(self.engine.adapter_names)
        if body.get("model", "policy") not in known:
            raise HttpFault(404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}})
        assert set(body) <= {"model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop",
                             "stop_token_ids", "logprobs", "return_token_ids"}  # fmt: skip
        asked = {"temperature": body["temperature"], "top_p": body["top_p"], "seed": body["seed"]}
        asked |= {"max_new_tokens": body["max_tokens"], "stop": body["stop"]}
        adapter = None if body.get("model", "policy") == "policy" else body["model"]
        if self.fails("death"):
            os._exit(3)
        done = self.generate(body["prompt"], asked, body["stop_token_ids"], adapter)
        reason, ids = done.finish_reason, done.ids
        if self.fails("abort"):
            reason, ids = "abort", ids[:1]
        choice = {
            "index": 0,
            "text": done.text,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": ids if body.get("return_token_ids") and not self.fails("no tokens") else None,
            "logprobs": {
                "token_logprobs": done.logprobs[: len(ids)],
                "tokens": [],
                "top_logprobs": [],
                "text_offset": [],
            },
        }
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": {}}

    def _load_adapter(self, body: dict[str, Any]) -> Any:
        if body["lora_name"] in self.engine.adapter_names and not body.get("load_inplace"):
            raise HttpFault(400, {"error": {"message": "The lora adapter has already been loaded.", "code": 400}})
        self.loaded.append(body["lora_path"])
        with self.lock:
            self.engine.load_adapter(body["lora_name"], Path(body["lora_path"]))
        return f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def _reload(self, body: dict[str, Any]) -> Any:
        if "method" not in body:
            raise HttpFault(400, {"error": {"message": "Missing 'method' in request body"}})
        if self.fails("dead worker"):
            raise HttpFault(500, {"error": {"message": "EngineCore encountered an issue"}})
        assert body["method"] == "reload_weights" and self.is_paused
        self.loaded.append(body["kwargs"]["weights_path"])
        if not self.fails("stale weights"):
            with self.lock:
                self._load(Path(body["kwargs"]["weights_path"]))
        return {"results": [None]}

    def _pause(self, _: dict[str, Any]) -> Any:
        self.is_paused = True
        return {"status": "paused"}

    def _resume(self, _: dict[str, Any]) -> Any:
        self.is_paused = False
        return {"status": "resumed"}

    def _reset_cache(self, _: dict[str, Any]) -> Any:
        if self.version == "0.23":
            return None
        return {"success": not self.fails("held blocks")}


class FakeSglang(FakeServer):
    """SGLang."""

    weight_version = "default"

    def answer(self, path: str, body: bytes | None) -> Any:
        if path == "/model_info":
            return {"model_path": "policy", "is_generation": True, "weight_version": "default"}
        if path == "/generate":
            return self._generate(_parse(body))
        if path == "/update_weights_from_disk":
            given = _parse(body)
            if self.fails("unreadable"):
                raise HttpFault(400, {"success": False, "message": "Failed to load", "num_paused_requests": 0})
            self.loaded.append(given["model_path"])
            self.weight_version = given["weight_version"]
            with self.lock:
                self._load(Path(given["model_path"]))
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if path == "/load_lora_adapter":
            given = _parse(body)
            self.loaded.append(given["lora_path"])
            with self.lock:
                self.engine.load_adapter(given["lora_name"], Path(given["lora_path"]))
            return {"success": True, "error_message": "", "loaded_adapters": {}}
        if path == "/unload_lora_adapter":
            return {"success": True, "error_message": "", "loaded_adapters": {}}
        raise HttpFault(404, {"detail": "Not Found"})

    def _generate(self, body: dict[str, Any]) -> Any:
        given = body["sampling_params"]
        asked = {"temperature": given["temperature"], "top_p": given["top_p"], "seed": given["sampling_seed"]}
        asked |= {"max_new_tokens": given["max_new_tokens"], "stop": given["stop"]}
        done = self.generate(body["input_ids"], asked, given["stop_token_ids"], body["lora_path"])
        triples = [[logprob, token, None] for logprob, token in zip(done.logprobs, done.ids, strict=True)]
        reason = {"type": done.finish_reason, "matched": done.ids[-1], "length": len(done.ids)}
        meta = {"id": "1", "finish_reason": reason, "output_token_logprobs": triples}
        meta["weight_version"] = self.weight_version
        return {"text": done.text, "output_ids": done.ids, "meta_info": meta}


def _parse(body: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(body or b"")
    except ValueError as error:
        raise HttpFault(400, {"error": {"message": "Invalid JSON format"}}) from error
    return dict(found)


@contextmanager
def running(server: FakeServer, port: int = 0) -> Iterator[str]:
    """Yield the address of a server that runs until the end of the context."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version: ClassVar[str] = "HTTP/1.1"  # type: ignore[misc]

        def do_GET(self) -> None:
            self._respond(None)

        def do_POST(self) -> None:
            self._respond(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _respond(self, body: bytes | None) -> None:
            server.asked[urlsplit(self.path).path] += 1
            try:
                status, told = 200, server.answer(self.path, body)
            except HttpFault as fault:
                status, told = fault.status, fault.body
            text = b"" if told is None else told.encode() if isinstance(told, str) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(told, str) else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


def main() -> None:
    """`python fake_servers.py MODEL PORT MARK`: vLLM that dies in its first answer, unless the file MARK exists."""
    model, port, mark = sys.argv[1:]
    server = FakeVllm(Path(model))
    if not Path(mark).exists():
        Path(mark).touch()
        server.faults["death"] = 1
    with running(server, int(port)) as url:
        print(url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
