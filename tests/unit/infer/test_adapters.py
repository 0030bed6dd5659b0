"""Adapters asked per request: the tokens are those of the model with that adapter in it."""

from __future__ import annotations

import pytest
import torch

from anabatic.config.sections.train_jobs import Lora
from anabatic.core.errors import ConfigError, DataError
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import Sampling
from anabatic.models.lora import adapter
from anabatic_testing.random_models import build_random_model

SHORT = Sampling(temperature=0.0, max_new_tokens=10)


def adapted(tokenizer, folder, seed, **settings):
    """A model with its own adapter in it, which is also saved."""
    model = build_random_model(len(tokenizer))
    lora = Lora(r=4, **settings)
    adapter.insert_adapter(model, lora)
    adapter.init_adapter_weights(model, lora, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapter.find_lora_layers(model).values():
            layer.lora_B.normal_(0, 0.3, generator=generator)
    adapter.save_adapter(model, folder, tokenizer, lora, folder.parent)
    return model


def test_requests_of_several_adapters_in_one_batch(tokenizer, tmp_path):
    targets = (["all-linear"], ["q_proj", "v_proj"], ["down_proj"])
    own = {f"a{n}": adapted(tokenizer, tmp_path / f"a{n}", n, target_modules=names) for n, names in enumerate(targets)}
    base = build_random_model(len(tokenizer))
    engine = Engine(base, tokenizer, max_batch=5, max_len=96, step_tokens=24)
    for name in own:
        engine.load_adapter(name, tmp_path / name)
    assert engine.adapter_names == ["a0", "a1", "a2"]
    beginning = list(range(40, 75))  # equal tokens, other adapters: their blocks must not be shared
    asked = [None, "a0", "a1", "a2", "a0", None, "a2", "a1", "a0"]
    requests = [
        engine.request([*beginning, 20 + number % 3], SHORT, [], adapter=name) for number, name in enumerate(asked)
    ]
    engine.submit(requests)
    while engine.is_busy:
        engine.step()
    for request, name in zip(requests, asked, strict=True):
        model = build_random_model(len(tokenizer)) if name is None else own[name]
        alone = Engine(model, tokenizer, max_batch=1, max_len=96).generate([request.prompt], SHORT, [])[0]
        assert request.ids == alone.ids, name
    assert len({tuple(request.ids) for request in requests}) > 4
    plain = build_random_model(len(tokenizer)).state_dict()
    for name, weight in base.state_dict().items():
        torch.testing.assert_close(weight, plain[name.replace(".base.", ".")], rtol=0, atol=0)


def test_what_cannot_be_asked_per_request_says_so(tokenizer, tmp_path):
    adapted(tokenizer, tmp_path / "dora", 1, use_dora=True)
    adapted(tokenizer, tmp_path / "good", 1)
    engine = Engine(build_random_model(len(tokenizer)), tokenizer, max_batch=1, max_len=64)
    with pytest.raises(DataError, match="DoRA.*changes the weights") as error:
        engine.load_adapter("d", tmp_path / "dora")
    assert "anabatic merge" in error.value.hint
    engine.load_adapter("good", tmp_path / "good")
    with pytest.raises(DataError, match='already an adapter "good"|adapter "good" already'):
        engine.load_adapter("good", tmp_path / "good")
    other = Engine(build_random_model(len(tokenizer), kv_heads=4), tokenizer, max_batch=1, max_len=64)
    with pytest.raises(DataError, match="made for another model"):
        other.load_adapter("good", tmp_path / "good")
    assert other.adapter_names == []
    with pytest.raises(DataError, match='no adapter "goood".* "good"'):
        engine.request([1], SHORT, adapter="goood")
    with pytest.raises((DataError, ConfigError)):
        engine.load_adapter("nothing", tmp_path / "nothing")
