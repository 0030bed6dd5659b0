"""Hugging Face folders: find, load, save."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder, folder_atomic
from anabatic.device.ops import for_device
from anabatic.models import adapter, attention, fuse, hub
from anabatic.parallel.world import World


def resolve(path: str | Path, named_hub: hub.Hub | None = None, world: World | None = None) -> Path:
    """Return the model folder that `path` means: itself, that of a run folder (best or final), or a hub's `OWNER/NAME`.

    Raises:
        DataError: there is no model there.
    """
    root = hub.fetch(str(path), named_hub, world) if hub.is_id(path) else Path(path).expanduser()
    run = RunFolder(root)
    for folder in (root, run.best_model, run.final_model):
        if (folder / "config.json").is_file() or (folder / adapter.CONFIG).is_file():
            return folder
    if not root.exists():
        raise DataError(f"model folder {root} does not exist", "give a Hugging Face folder or a finished run folder")
    raise DataError(
        f"{root} holds no config.json or adapter_config.json, and no best_model or final_model either",
        "give a Hugging Face folder, or let the run finish (the same command continues it)",
    )


def base_of(folder: Path, named_hub: hub.Hub | None = None, world: World | None = None) -> Path:
    """Return the folder with the weights: of an adapter the model it was made for, else `folder` itself.

    Raises:
        DataError: that model is not there, or an adapter too.
    """
    if (folder / "config.json").is_file():
        return folder
    name = adapter.read_config(folder).get("base_model_name_or_path") or ""
    if not name or not (Path(name).exists() or hub.is_id(name)):
        raise DataError(
            f"{folder} is an adapter for {name or 'a model it does not name'}, which is not there",
            "fetch that model, and write its folder into adapter_config.json as base_model_name_or_path",
        )
    base = resolve(name, named_hub, world)
    if not (base / "config.json").is_file():
        raise DataError(f"{folder} is an adapter for {base}, an adapter too", "merge that one first: `anabatic merge`")
    return base


def is_adapter(path: str | Path) -> bool:
    """True for an adapter folder, or a run folder that holds one."""
    return not (resolve(path) / "config.json").is_file()


def _check_files(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:3])}",
            "copy the folder again; only safetensors are read",
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "copy the folder again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {type(content).__name__}, not an object", "copy the folder again")
    return content


def load_config(path: str | Path) -> PretrainedConfig:
    """Read the configuration of a model folder, without its weights.

    Raises:
        DataError: config.json is missing, torn or of an unknown architecture.
    """
    folder = base_of(resolve(path))
    _read_json(folder / "config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise DataError(f"{folder / 'config.json'}: {_first_line(error)}", "copy the folder again") from error
    return config


def load_model(path: str | Path, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal language model onto `device` with packed attention and the device's fused operators.

    An adapter folder gives the model it was made for with the adapter in it, all but the adapter frozen.

    Raises:
        DataError: the folder or a file in it is missing, torn or of an unknown architecture.
    """
    named = resolve(path)
    folder = base_of(named)
    transformers_logging.disable_progress_bar()
    config = load_config(folder)
    _check_files(folder)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention.NAME,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{folder} cannot be loaded: {_first_line(error)}", "is the folder complete?") from error
    except Exception as error:  # safetensors raises its own class, straight from Rust
        if type(error).__name__ != "SafetensorError":
            raise
        raise DataError(f"{folder} has a torn weight file: {_first_line(error)}", "copy it again") from error
    model, told = loaded
    _require_whole(folder, told)
    model = prepare(model.to(device))
    if folder != named:
        adapter.load(model, named)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers prints a table of what does not fit and goes on; `_require_whole` says it in our words."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _require_whole(folder: Path, told: dict[str, Any]) -> None:
    """Every weight that config.json describes must be there and have its shape: transformers fills in random ones."""
    if mismatched := sorted(told["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise DataError(
            f"{folder}: {len(mismatched)} weights do not fit config.json: {name} has shape {list(stored)},"
            f" the configuration says {list(wanted)}",
            "weights and config.json are of different models: copy the folder again",
        )
    if missing := sorted(told["missing_keys"]):
        raise DataError(
            f"{folder}: {len(missing)} weights that config.json describes are missing: {', '.join(missing[:3])}",
            "the folder holds another architecture, or only a part of the model: copy it again",
        )
    if surplus := sorted(told["unexpected_keys"]):
        log.warn(f"{folder}: {len(surplus)} weights are not part of the model and not used: {', '.join(surplus[:3])}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require_fit(config: PretrainedConfig, tokenizer: Any, folder: Path, seq_len: int = 0) -> None:
    """Make sure that a model has room for a tokenizer's entries and for segments of `seq_len` positions.

    Raises:
        DataError: it has not.
    """
    if len(tokenizer) > config.vocab_size:
        raise DataError(
            f"the tokenizer of {folder} has {len(tokenizer)} entries, the model {config.vocab_size}",
            "use the tokenizer that the model was trained with",
        )
    if seq_len > config.max_position_embeddings:
        raise DataError(
            f"batch.seq_len is {seq_len}, the model was made for {config.max_position_embeddings} positions",
            f"use --batch.seq-len {config.max_position_embeddings} or less",
        )


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model on its device our attention and fused operators."""
    model.config._attn_implementation = attention.NAME
    model.config.use_cache = False
    found = fuse.install(model, for_device(model.device.type))
    log.debug("fused operators: " + ", ".join(f"{name} x{times}" for name, times in found.items()))
    return model


def enable_recompute(model: PreTrainedModel) -> None:
    """Switch activation checkpointing on. transformers renamed the method in 5.x; the old name goes in 6."""
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def save_model(model: PreTrainedModel, folder: Path, tokenizer: Any) -> None:
    """Write a Hugging Face folder that plain transformers loads: whole or not at all.

    Raises:
        Failure: the disk is full or refuses writes; an older folder is untouched.
    """
    ids = _chat_ids(tokenizer)
    transformers_logging.disable_progress_bar()
    with folder_atomic(folder) as temporary:
        implementation = model.config._attn_implementation
        model.config._attn_implementation = "sdpa"
        model.config.use_cache = True
        try:
            model.generation_config = GenerationConfig(**ids)
            model.save_pretrained(temporary)
        finally:
            model.config._attn_implementation = implementation
            model.config.use_cache = False
        tokenizer.save_pretrained(temporary)


def _chat_ids(tokenizer: Any) -> dict[str, Any]:
    """End of text and end of turn both end an answer."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if turn is not None and turn != tokenizer.unk_token_id and turn not in ends:
        ends.append(turn)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return {"eos_token_id": ends or None, "pad_token_id": pad}
