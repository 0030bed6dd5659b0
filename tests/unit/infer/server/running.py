"""Servers on free ports of this machine."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from anabatic.config.chat import Sampling
from anabatic.config.serve import ServerLimits
from anabatic.infer.server.app import create_app
from anabatic.infer.server.engine_worker import EngineWorker
from anabatic.infer.server.listening import make_protocol_class
from anabatic.infer.server.model_registry import ModelRegistry, ServedModel
from unit.web_server import listening

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
def serving(catalogue, keys=(), cors=(), hosts=None, weights_folder=None):
    worker = EngineWorker(catalogue.engines)
    worker.start()
    app = create_app(catalogue, worker, keys, cors, hosts, weights_folder)
    try:
        with listening(app, http=make_protocol_class(catalogue.limits.body_seconds)) as url:
            yield Running(url, catalogue, worker)
    finally:
        worker.stop()
        worker.join(30)
    assert not worker.failure


def catalogue_of(parts, cut=False, **limits):
    served = [ServedModel(name, engine, model) for name, (engine, model) in parts.items()]
    return ModelRegistry(served, {}, Sampling(temperature=0.0, max_new_tokens=16), ServerLimits(**limits), cut)
