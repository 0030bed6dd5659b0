"""The model in a checkpoint folder: an adapter or a model as others save them, or the tensors of a run of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from anabatic.config import load, yaml_file
from anabatic.config.train import TuneJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.model_files import no_model
from anabatic.core.text import did_you_mean
from anabatic.data import templates
from anabatic.device.device import Device
from anabatic.models import adapter, stack
from anabatic.models.hf import base_of, below, fill, load_model, prepare, resolve, skeleton, tokenizer_folder
from anabatic.parallel.sharded import materialise
from anabatic.parallel.world import World
from anabatic.train import checkpoint, manifest


def model_of(
    path: Path, device: Device, adapters: Sequence[str] = (), quantize: Literal["none", "int8", "nf4"] = "none"
) -> tuple[PreTrainedModel, Path]:
    """Return the model of a checkpoint folder, and the folder with its tokenizer.

    Raises:
        DataError: nothing is there, or it is the checkpoint of a run whose model cannot be built from its settings.
        CheckpointError: its tensors do not fit.
    """
    if path.is_file():
        raise no_model(path)
    if not path.is_dir():
        found = [one.name for one in path.parent.glob("checkpoint-*")] if path.parent.is_dir() else []
        there = f"there are {', '.join(sorted(found)[:8])}" if found else "there is no checkpoint beside it"
        raise DataError(f"{path} does not exist.{did_you_mean(path.name, found)}", there)
    if (path / "config.json").is_file() or (path / adapter.CONFIG).is_file():
        named = resolve(path)
        shares = below(adapters, named)
        return load_model(named, device.torch, device.dtype, shares, quantize), _tokens(named, shares, path)
    return _of_our_run(path, device)


def _tokens(named: Path, shares: list[stack.Share], path: Path) -> Path:
    """The folder of the tokenizer: that of an adapter without one is its base model's."""
    folder = tokenizer_folder(named, shares)
    return folder if (folder / "tokenizer.json").is_file() else base_of(named)


def _of_our_run(path: Path, device: Device) -> tuple[PreTrainedModel, Path]:
    problem = manifest.fault(path)
    if problem:
        raise DataError(
            f"{path} holds no config.json or adapter_config.json, and as a checkpoint of ours {problem}",
            "give RUN/checkpoint-STEP as the training wrote it, or a model: -m RUN",
        )
    settings = yaml_file.read(path / "config.yaml").tree
    if not isinstance(settings.get("model"), str):
        raise DataError(
            f"{path} is of a run that built its own model, which only its model folders describe",
            f"use them: -m {path.parent}",
        )
    job: TuneJob = load.load(_command(settings), [path / "config.yaml"])
    named = resolve(job.model)
    base = base_of(named)
    shares = below(job.adapter, named)
    model = skeleton(base, device.dtype)
    if named != base:
        adapter.prepare(model, named)
    elif job.tuner == "lora":
        adapter.insert(model, job.lora)
    elif job.tuner == "freeze":
        adapter.freeze(model, job.freeze)
    model = prepare(model, device.torch)
    materialise(model, device.torch, device.torch)
    fill(model, base)
    stack.merge(model, shares)
    if job.tuner == "lora" and named == base:
        adapter.begin(model, job.lora, job.seed)
    _fill(path, model)
    log.info(f"{path}: the model of step {path.name.rpartition('-')[2]}, on {base}")
    tokens = Path(job.tokenizer) if job.tokenizer else _tokens(named, shares, path)
    return model, templates.folder_with(tokens, job.chat_template)


def _command(settings: dict[str, Any]) -> str:
    """The command whose settings these are: pairs of answers have a loss of their own."""
    return "dpo" if "loss" in settings or "beta" in settings else "sft"


def _fill(path: Path, model: PreTrainedModel) -> None:
    """Put what was trained into the model, in the model's format."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    own = {name: tensor for name, tensor in model.state_dict().items() if name in trained or name in buffers}
    wide = {f"model.{name}": tensor.detach().float() for name, tensor in own.items()}
    before = adapter.starts(model)
    checkpoint.read(path, wide, World())
    for name, tensor in own.items():
        tensor.copy_(wide[f"model.{name}"])
    adapter.begin_again(model, before)
