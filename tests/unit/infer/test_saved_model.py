"""Checkpoints of runs: the model that a training would continue with is the one that answers."""

from __future__ import annotations

import json

import pytest
import torch

from anabatic.config.loading import settings
from anabatic.config.sections.common import Data, DeviceSettings
from anabatic.config.sections.train_jobs import Lora
from anabatic.config.sft import SftJob
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder
from anabatic.device.device import select_device
from anabatic.models.lora import adapter
from anabatic.models.pretrained import load_model, save_model
from anabatic.parallel.world import World
from anabatic.recipes.batch_inference import load_checkpoint_model
from anabatic.train.checkpoint import storage


def saved(folder, base, job, model, device):
    """Write a checkpoint with what is trained of a model."""
    run = RunFolder(folder)
    run.create_folder()
    run.config.write_text(settings.dump_job(job))
    trained = {f"model.{name}": one.detach() for name, one in model.named_parameters() if one.requires_grad}
    storage.ignore_dcp_warnings()
    return storage.save_checkpoint(
        run, 7, storage.CheckpointContent(trained, device.get_rng_state(), '{"progress": {}}'), World()
    )


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_the_model_of_a_run(tuner, model, tokenizer, tmp_path):
    base, device = tmp_path / "base", select_device(DeviceSettings(type="cpu", threads=1))
    save_model(model, base, tokenizer)
    lora = Lora(r=2, target_modules=["q_proj"])
    job = SftJob(model=str(base), out=str(tmp_path / "run"), tuner=tuner, lora=lora, data=Data(train=["rows.jsonl"]))
    trained = load_model(base, device.torch_device)
    if tuner == "lora":
        adapter.insert_adapter(trained, lora)
        adapter.init_adapter_weights(trained, lora, 1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.01 if parameter.requires_grad else 0.0
    path = saved(tmp_path / "run", base, job, trained, device)
    found, tokens = load_checkpoint_model(path, device)
    assert tokens == base
    for (name, one), (_, other) in zip(found.named_parameters(), trained.named_parameters(), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=0, atol=0, msg=name)
    (path / "state.json").write_text(json.dumps({"torn": True}))
    with pytest.raises(DataError, match="state.json"):
        load_checkpoint_model(path, device)
