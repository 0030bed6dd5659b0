"""Checkpoints of runs: the model that a training would go on with is the one that answers."""

from __future__ import annotations

import json

import pytest
import torch

from anabatic.config import load
from anabatic.config.sft import SftJob
from anabatic.config.shared import Data, Device
from anabatic.config.tuner import Lora
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder
from anabatic.device.device import pick
from anabatic.models import adapter
from anabatic.models.hf import load_model, save_model
from anabatic.parallel.world import World
from anabatic.recipes.saved_model import model_of
from anabatic.train import checkpoint


def saved(folder, base, job, model, device):
    """Write a checkpoint with what is trained of a model."""
    run = RunFolder(folder)
    run.create()
    run.config.write_text(load.dump(job))
    trained = {f"model.{name}": one.detach() for name, one in model.named_parameters() if one.requires_grad}
    checkpoint.quiet()
    return checkpoint.save(run, 7, checkpoint.Content(trained, device.rng_state(), '{"progress": {}}'), World())


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_the_model_of_a_run(tuner, model, tokenizer, tmp_path):
    base, device = tmp_path / "base", pick(Device(type="cpu", threads=1))
    save_model(model, base, tokenizer)
    lora = Lora(r=2, target_modules=["q_proj"])
    job = SftJob(model=str(base), out=str(tmp_path / "run"), tuner=tuner, lora=lora, data=Data(train=["rows.jsonl"]))
    trained = load_model(base, device.torch)
    if tuner == "lora":
        adapter.insert(trained, lora)
        adapter.begin(trained, lora, 1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.01 if parameter.requires_grad else 0.0
    path = saved(tmp_path / "run", base, job, trained, device)
    found, tokens = model_of(path, device)
    assert tokens == base
    for (name, one), (_, other) in zip(found.named_parameters(), trained.named_parameters(), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=0, msg=name)
    (path / "state.json").write_text(json.dumps({"torn": True}))
    with pytest.raises(DataError, match="state.json"):
        model_of(path, device)
