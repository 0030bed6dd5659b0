"""A model and an adapter on it, and a way to export them."""

from __future__ import annotations

import pytest
import torch

from anabatic.config.export import ExportJob
from anabatic.config.tuner import Lora
from anabatic.models import adapter
from anabatic.models.hf import save_model
from anabatic.recipes import export
from anabatic.testing.untrained import byte_tokenizer, random_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("export") / "base"
    save_model(random_model(len(tokenizer), max_len=256), folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def lora(tmp_path_factory, tokenizer, model):
    net, settings = random_model(len(tokenizer), max_len=256), Lora(r=2, target_modules=["q_proj", "down_proj"])
    adapter.insert(net, settings)
    adapter.begin(net, settings, 0)
    for layer in adapter.layers(net).values():
        torch.nn.init.normal_(layer.lora_B, 0.0, 0.3, torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("export") / "lora"
    adapter.save(net, folder, tokenizer, settings, model)
    return folder


@pytest.fixture
def write(model, tmp_path):
    def go(**settings):
        job = ExportJob(**{"model": str(model), "out": str(tmp_path / "out"), **settings})
        export.run(job)
        return tmp_path / "out"

    return go
