"""A model and an adapter on it, and a way to export them."""

from __future__ import annotations

import pytest
import torch

from anabatic.config.export import ExportJob
from anabatic.config.sections.train_jobs import Lora
from anabatic.models.lora import adapter
from anabatic.models.pretrained import save_model
from anabatic.recipes.export import model_folder
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return build_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("export") / "base"
    save_model(build_random_model(len(tokenizer), max_len=256), folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def lora(tmp_path_factory, tokenizer, model):
    net, settings = build_random_model(len(tokenizer), max_len=256), Lora(r=2, target_modules=["q_proj", "down_proj"])
    adapter.insert_adapter(net, settings)
    adapter.init_adapter_weights(net, settings, 0)
    for layer in adapter.find_lora_layers(net).values():
        torch.nn.init.normal_(layer.lora_B, 0.0, 0.3, torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("export") / "lora"
    adapter.save_adapter(net, folder, tokenizer, settings, model)
    return folder


@pytest.fixture
def write(model, tmp_path):
    def go(**settings):
        job = ExportJob(**{"model": str(model), "out": str(tmp_path / "out"), **settings})
        model_folder.run(job)
        return tmp_path / "out"

    return go
