"""Servers on free ports of this machine."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")
pytest.importorskip("fastapi", reason="the extra serve is not installed")

from anabatic.config.chat import Sampling  # noqa: E402 - after the skips
from anabatic.config.serve import ServerLimits  # noqa: E402
from anabatic.infer.server.app import create_app  # noqa: E402
from anabatic.infer.server.engine_worker import EngineWorker  # noqa: E402
from anabatic.infer.server.listening import make_protocol_class  # noqa: E402
from anabatic.infer.server.model_registry import ModelRegistry, ServedModel  # noqa: E402

KEY = "sk-right"


@dataclass
class Running:
    """A server that runs."""

    url: str
    catalogue: ModelRegistry
    worker: EngineWorker

    def client(self, **more):
        return httpx2.Client(base_url=self.url, timeout=240, **more)

    def post(self, path, body, **more):
        with self.client() as client:
            return client.post(path, json=body, **more)


@contextmanager
def serving(catalogue, keys=(), cors=(), hosts=None):
    worker = EngineWorker(catalogue.engines)
    worker.start()
    config = uvicorn.Config(
        create_app(catalogue, worker, keys, cors, hosts),
        port=0,
        log_level="warning",
        timeout_graceful_shutdown=2,
        http=make_protocol_class(catalogue.limits.body_seconds),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", catalogue, worker)
    finally:
        server.should_exit = True
        thread.join(30)
        worker.stop()
        worker.join(30)
    assert not worker.failure


def catalogue_of(parts, cut=False, **limits):
    served = [ServedModel(name, engine, model) for name, (engine, model) in parts.items()]
    return ModelRegistry(served, {}, Sampling(temperature=0.0, max_new_tokens=16), ServerLimits(**limits), cut)
