"""Settings that have no effect are said, not skipped in silence."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from anabatic.config.sections.common import Data, DerivedSizes, DeviceSettings, Optim, Schedule
from anabatic.config.sections.train_jobs import Freeze, Lora
from anabatic.config.sft import SftJob
from anabatic.core.errors import ConfigError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import select_device
from anabatic.models import pretrained
from anabatic.models.lora import adapter
from anabatic.recipes.training import trained_model
from anabatic.train import sizing as planning
from anabatic_testing.tiny_corpora import write_byte_tokenizer
from anabatic_testing.tiny_models import build_tiny_model


@pytest.mark.parametrize(
    ("tuner", "settings", "told"),
    [
        ("full", {"lora": Lora(r=4)}, "tuner is full: the settings of lora are not used"),
        ("lora", {"freeze": Freeze(last_layers=1)}, "tuner is lora: the settings of freeze are not used"),
        ("auto", {"lora": Lora(r=2)}, "; the settings of lora are not used: it continues as it is"),
    ],
)
def test_sections_of_another_tuner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tuner: str, settings: dict[str, Lora], told: str
) -> None:
    tok = tokenizers.load_tokenizer(write_byte_tokenizer(tmp_path / "tok"))
    model, base, saved = build_tiny_model(), tmp_path / "base", tmp_path / "saved"
    pretrained.save_model(model, base, tok)
    adapter.insert_adapter(model, Lora(r=4))
    adapter.init_adapter_weights(model, Lora(r=4), 0)
    adapter.save_adapter(model, saved, tok, Lora(r=4), base)
    device = select_device(DeviceSettings(type="cpu", threads=1))
    for more, warned in ((settings, True), ({}, False)):
        job = SftJob(model=str(base), data=Data(train=["rows.json"]), tuner=tuner, **more)  # type: ignore[arg-type]
        caplog.clear()
        with caplog.at_level(logging.WARNING, "anabatic"):
            named = saved if tuner == "auto" else base
            trained_model._build_meta_model(job, named, base, device, tok, tmp_path / "tok")
        assert (told in caplog.text) == warned


def test_rates_of_muon_beside_adamw(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "anabatic"):
        planning.resolve_learning_rates(DerivedSizes(), Optim(name="adamw"), 64, 1024, 2e-5)
        planning.resolve_learning_rates(DerivedSizes(), Optim(name="muon", matrix_lr=0.1), 64, 1024, 2e-5)
        assert not caplog.text
        planning.resolve_learning_rates(DerivedSizes(), Optim(name="adamw", matrix_lr=0.1), 64, 1024, 2e-5)
    assert "optim.name is adamw: matrix_lr and momentum are Muon's and not used" in caplog.text


def test_few_steps_come_with_advice() -> None:
    plan = DerivedSizes()
    assert planning.resolve_total_steps(plan, Schedule(epochs=1.0), 2900, 2900, "", 4096) == 1
    assert "raise schedule.epochs, or lower batch.global_batch_tokens" in plan.reasons["steps"]
    assert planning.resolve_total_steps(plan, Schedule(epochs=10.0), 4096, 4096, "", 4096) == 10
    assert plan.reasons["steps"] == "10 epochs of 4.1K tokens"


@pytest.mark.parametrize(("tokens", "warned"), [(40_000.0, False), (1_850_000.0, True)])
def test_a_corpus_too_small_for_the_model_is_said(
    tokens: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "anabatic"):
        assert (
            planning.resolve_total_steps(DerivedSizes(), Schedule(), 1000, tokens, "12 tokens each", 1000)
            == tokens / 1000
        )
    assert ("12 tokens each are 1,850 passes over the data" in caplog.text) == warned


@pytest.mark.parametrize(
    "wrong", [{"beta1": 1.0}, {"beta2": -0.1}, {"momentum": 2.0}, {"eps": -1e-8}, {"weight_decay": -0.1}]
)
def test_numbers_that_no_optimizer_takes(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"optim.{name} is {value}"):
        Optim(**wrong)  # type: ignore[arg-type]
