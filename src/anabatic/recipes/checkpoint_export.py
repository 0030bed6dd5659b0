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
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from anabatic.config import load
from anabatic.config.checkpoint_export import CheckpointExportJob
from anabatic.config.pretrain import PretrainJob
from anabatic.config.shared import Device as DeviceConfig
from anabatic.config.train import TuneJob
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.text import count
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import DTYPES, Device, pick
from anabatic.models import adapter
from anabatic.models.hf import resolve, save_model
from anabatic.models.place import place
from anabatic.models.stack import record
from anabatic.parallel.shard import Division
from anabatic.parallel.world import World
from anabatic.recipes import outputs, pretrain, sft
from anabatic.train import checkpoint, manifest
from anabatic.train.run import weights_of

Write = Callable[[Path], None]


def run(job: CheckpointExportJob) -> None:
    """Export as the job says.

    Raises:
        ConfigError: `out` exists, or the checkpoint is of a command whose models are no such folders.
        DataError: there is no whole checkpoint, or its base model or tokenizer is gone.
        Failure: the folder cannot be written.
    """
    out = Path(job.out).expanduser()
    outputs.require_new(out)
    path = manifest.newest_whole(Path(job.checkpoint).expanduser())
    command = manifest.read(path).get("command", "an unknown command")
    if command not in _BUILD:
        raise ConfigError(
            f"{path} is a checkpoint of {command}, and only those of {', '.join(_BUILD)} are exported",
            "the command that saved it writes best_model and final_model: the same one continues it",
        )
    if not (path / "config.yaml").is_file():
        raise DataError(f"{path} holds no config.yaml", "copy the checkpoint again, with all its files")
    device = pick(DeviceConfig(type="cpu"))
    model, write = _BUILD[command](load.load(command, [path / "config.yaml"]), device)
    _read(model, path)
    if job.dtype != "auto":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[job.dtype])
    write(out)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    log.info(f"wrote {out}: step {manifest.read(path)['step']} of {path.parent}, {count(trained)} trained parameters")


def _read(model: PreTrainedModel, path: Path) -> None:
    """Read what was trained, in the format it was trained in."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, parameter in model.named_parameters():
        entry = stored.get(f"model.{name}")
        if parameter.requires_grad and isinstance(entry, TensorStorageMetadata):
            parameter.data = parameter.data.to(entry.properties.dtype)
    checkpoint.read(path, weights_of(model), World())


def _pretrained(job: PretrainJob, device: Device) -> tuple[PreTrainedModel, Write]:
    folder = Path(job.tokenizer) if job.tokenizer else resolve(str(job.model.path))
    tokenizer = tokenizers.load(folder)
    _, model = pretrain.skeleton_of(job, len(tokenizer), torch.float32)
    place(model, Division(), device, World())
    return model, lambda out: save_model(model, out, tokenizer)


def _tuned(job: TuneJob, device: Device) -> tuple[PreTrainedModel, Write]:
    # What is trained is built in fp32; it takes the checkpoint's format once that is known.
    plain: Any = replace(job, optim=replace(job.optim, weights="fp32"))
    start = sft.opened(plain, device, World())
    sft.filled(plain, start, Division(), device, World())
    if start.lora is None:
        return start.model, lambda out: save_model(start.model, out, start.tokenizer)
    lora, more = start.lora, record(start.shares)
    return start.model, lambda out: adapter.save(start.model, out, start.tokenizer, lora, start.base, True, more)


_BUILD: dict[str, Callable[[Any, Device], tuple[PreTrainedModel, Write]]] = {
    "pretrain": _pretrained, "sft": _tuned, "dpo": _tuned,
}  # fmt: skip
