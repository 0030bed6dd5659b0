"""A server with two tiny models, for all tests of this folder."""

from __future__ import annotations

import pytest

from anabatic.infer.engine import Engine
from anabatic_testing.random_models import build_random_model
from unit.infer.server.running import catalogue_of, serving


@pytest.fixture(scope="session")
def engine_parts(tokenizer):
    models = {name: build_random_model(len(tokenizer), seed=seed) for name, seed in (("one", 0), ("two", 1))}
    return {name: (Engine(model, tokenizer, max_batch=4, max_len=128), model) for name, model in models.items()}


@pytest.fixture(scope="session")
def server(engine_parts):
    with serving(catalogue_of(engine_parts, body_mib=0.25, new_tokens=64, answers=8)) as running:
        yield running
