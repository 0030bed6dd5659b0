"""The model in a checkpoint folder: an adapter or a model as others save them, or the tensors of a run of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from anabatic.config.loading import settings as settings_module
from anabatic.config.loading import yaml_reader
from anabatic.config.sections.train_jobs import TuneJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean
from anabatic.core.model_format import describe_wrong_model
from anabatic.data.chat import custom_templates
from anabatic.device.device import Device
from anabatic.models.lora import adapter, merging
from anabatic.models.pretrained import (
    build_meta_causal_lm,
    find_tokenizer_folder,
    load_folder_weights,
    load_model,
    prepare_model,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)
from anabatic.parallel.dtensors import materialize_parameters
from anabatic.parallel.process_groups import World
from anabatic.train.checkpoint import manifest, storage


def load_checkpoint_model(
    path: Path, device: Device, adapters: Sequence[str] = (), quantize: Literal["none", "int8", "nf4"] = "none"
) -> tuple[PreTrainedModel, Path]:
    """Return the model of a checkpoint folder, and the folder with its tokenizer.

    Raises:
        DataError: nothing is there, or it is the checkpoint of a run whose model cannot be built from its settings.
        CheckpointError: its tensors do not fit.
    """
    if path.is_file():
        raise describe_wrong_model(path)
    if not path.is_dir():
        found = [one.name for one in path.parent.glob("checkpoint-*")] if path.parent.is_dir() else []
        contents = f"there are {', '.join(sorted(found)[:8])}" if found else "there is no checkpoint beside it"
        raise DataError(f"{path} does not exist.{did_you_mean(path.name, found)}", contents)
    if (path / "config.json").is_file() or (path / adapter.ADAPTER_CONFIG_FILE).is_file():
        named_folder = resolve_model_folder(path)
        adapters_to_merge = resolve_merged_adapters(adapters, named_folder)
        return load_model(
            named_folder, device.torch_device, device.dtype, adapters_to_merge, quantize
        ), _find_tokenizer_folder(named_folder, adapters_to_merge, path)
    return _load_run_checkpoint(path, device)


def _find_tokenizer_folder(named_folder: Path, adapters_to_merge: list[merging.WeightedAdapter], path: Path) -> Path:
    """The folder of the tokenizer: that of an adapter without one is its base model's."""
    folder = find_tokenizer_folder(named_folder, adapters_to_merge)
    return folder if (folder / "tokenizer.json").is_file() else resolve_base_folder(named_folder)


def _load_run_checkpoint(path: Path, device: Device) -> tuple[PreTrainedModel, Path]:
    problem = manifest.find_first_fault(path)
    if problem:
        raise DataError(
            f"{path} holds no config.json or adapter_config.json, and as a checkpoint of ours {problem}",
            "give RUN/checkpoint-STEP as the training wrote it, or a model: -m RUN",
        )
    settings = yaml_reader.read_yaml(path / "config.yaml").tree
    if not isinstance(settings.get("model"), str):
        raise DataError(
            f"{path} is of a run that built its own model, which only its model folders describe",
            f"use them: -m {path.parent}",
        )
    job: TuneJob = settings_module.load_job(_infer_command(settings), [path / "config.yaml"])
    named_folder = resolve_model_folder(job.model)
    base = resolve_base_folder(named_folder)
    adapters_to_merge = resolve_merged_adapters(job.adapter, named_folder)
    model = build_meta_causal_lm(base, device.dtype)
    if named_folder != base:
        adapter.insert_saved_adapter(model, named_folder)
    elif job.tuner == "lora":
        adapter.insert_adapter(model, job.lora)
    elif job.tuner == "freeze":
        adapter.freeze_parameters(model, job.freeze)
    model = prepare_model(model, device.torch_device)
    materialize_parameters(model, device.torch_device, device.torch_device)
    load_folder_weights(model, base)
    merging.merge_adapters(model, adapters_to_merge)
    if job.tuner == "lora" and named_folder == base:
        adapter.init_adapter_weights(model, job.lora, job.seed)
    _load_trained_weights(path, model)
    log.info(f"{path}: the model of step {path.name.rpartition('-')[2]}, on {base}")
    tokens = Path(job.tokenizer) if job.tokenizer else _find_tokenizer_folder(named_folder, adapters_to_merge, path)
    return model, custom_templates.folder_with_template(tokens, job.chat_template)


def _infer_command(settings: dict[str, Any]) -> str:
    """The command whose settings these are: pairs of answers have a loss of their own."""
    return "dpo" if "loss" in settings or "beta" in settings else "sft"


def _load_trained_weights(path: Path, model: PreTrainedModel) -> None:
    """Put what was trained into the model, in the model's format."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in trained or name in buffers}
    wide = {f"model.{name}": tensor.detach().float() for name, tensor in tensors.items()}
    before = adapter.get_initial_products(model)
    storage.read_tensors(path, wide, World())
    for name, tensor in tensors.items():
        tensor.copy_(wide[f"model.{name}"])
    adapter.restore_pissa_base(model, before)
