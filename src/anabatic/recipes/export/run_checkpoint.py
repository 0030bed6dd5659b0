"""`anabatic checkpoint export`: what a checkpoint holds becomes a folder that transformers or PEFT loads.

The model is built as the run that saved it builds it, in one process on the CPU, whatever strategy that run had; then
the checkpoint's weights are read into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from anabatic.config.export import CheckpointExportJob
from anabatic.config.loading import settings
from anabatic.config.pretrain import PretrainJob
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.train_jobs import TuneJob
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import format_count
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import DTYPES, Device, select_device
from anabatic.models.lora import adapter
from anabatic.models.lora.merging import make_merged_record
from anabatic.models.model_init import materialize_model
from anabatic.models.pretrained import save_model
from anabatic.parallel.sharding import ShardingPlan
from anabatic.parallel.world import World
from anabatic.recipes.prechecks import data_files
from anabatic.recipes.training import pretrain, trained_model
from anabatic.train.checkpoint import dcp_reader, manifest, storage
from anabatic.train.run_folder import collect_weights

ModelWriter = Callable[[Path], None]


def run(job: CheckpointExportJob) -> None:
    """Export as the job says.

    Raises:
        ConfigError: `out` exists, or the checkpoint is of a command whose models are no such folders.
        DataError: there is no whole checkpoint, or its base model or tokenizer is gone.
        Failure: the folder cannot be written.
    """
    out = Path(job.out).expanduser()
    data_files.require_new_output(out)
    path = manifest.find_newest_valid(Path(job.checkpoint).expanduser())
    command = manifest.read_manifest(path).get("command", "an unknown command")
    if command not in _MODEL_BUILDERS:
        raise ConfigError(
            f"{path} is a checkpoint of {command}, and only those of {', '.join(_MODEL_BUILDERS)} are exported",
            "the command that saved it writes best_model and final_model: the same one continues it",
        )
    if not (path / "config.yaml").is_file():
        raise DataError(f"{path} holds no config.yaml", "copy the checkpoint again, with all its files")
    device = select_device(DeviceConfig(type="cpu"))
    model, write = _MODEL_BUILDERS[command](settings.load_job(command, [path / "config.yaml"]), device)
    _load_checkpoint_weights(model, path)
    if job.dtype != "auto":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[job.dtype])
    write(out)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    log.info(
        f"wrote {out}: step {manifest.read_manifest(path)['step']} of {path.parent}, {format_count(trained)} trained "
        f"parameters"
    )


def _load_checkpoint_weights(model: PreTrainedModel, path: Path) -> None:
    """Read what was trained, in the format it was trained in."""
    stored = dcp_reader.read_index(path).state_dict_metadata
    for name, parameter in model.named_parameters():
        entry = stored.get(f"model.{name}")
        if parameter.requires_grad and isinstance(entry, TensorStorageMetadata):
            parameter.data = parameter.data.to(entry.properties.dtype)
    storage.read_tensors(path, collect_weights(model), World())


def _build_pretrained(job: PretrainJob, device: Device) -> tuple[PreTrainedModel, ModelWriter]:
    facts = trained_model.find_training_model(job, World())
    tokenizer_folder = Path(job.tokenizer) if job.tokenizer else facts.folder
    assert tokenizer_folder is not None  # a new model needs a tokenizer
    tokenizer = tokenizers.load_tokenizer(tokenizer_folder)
    _, model = pretrain.build_meta_model(job, facts.base_folder, len(tokenizer), torch.float32)
    materialize_model(model, ShardingPlan(), device, World())
    return model, lambda out: save_model(model, out, tokenizer)


def _build_finetuned(job: TuneJob, device: Device) -> tuple[PreTrainedModel, ModelWriter]:
    # What is trained is built in fp32; it takes the checkpoint's format once that is known.
    plain: Any = replace(job, optim=replace(job.optim, weights="fp32"))
    start = trained_model.build_model(plain, trained_model.find_training_model(job, World()), device, World())
    trained_model.load_weights(plain, start, ShardingPlan(), device, World())
    if start.lora is None:
        return start.model, lambda out: save_model(start.model, out, start.tokenizer)
    lora, more = start.lora, make_merged_record(start.merged_adapters)
    return start.model, lambda out: adapter.save_adapter(
        start.model, out, start.tokenizer, lora, start.base_folder, True, more
    )


_MODEL_BUILDERS: dict[str, Callable[[Any, Device], tuple[PreTrainedModel, ModelWriter]]] = {
    "pretrain": _build_pretrained, "sft": _build_finetuned, "dpo": _build_finetuned,
}  # fmt: skip
