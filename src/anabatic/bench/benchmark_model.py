"""The model of a measurement: a folder's, or one with random weights and made-up words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from anabatic.bench import synthetic_data
from anabatic.config.pretrain import PretrainModel
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import Device
from anabatic.models.model_init import build_meta_qwen3, count_parameters, init_weights
from anabatic.models.pretrained import (
    find_tokenizer_folder,
    load_config,
    load_model,
    prepare_model,
    require_engine_model,
    require_tokenizer_fits,
    resolve_model_folder,
)
from anabatic.parallel.sharded_tensors import materialize_parameters
from anabatic.plan.depth_dial import derive_model_sizes

_MAX_POSITIONS = 8192


def load_benchmark_model(
    name: str, depth: int, folder: Path, device: Device, quantize: Literal["none", "int8", "nf4"] = "none"
) -> tuple[PreTrainedModel, Any, str]:
    """Return a model where it runs, its tokenizer, and what it is in words.

    Args:
        name: of a folder; empty: random weights.
        folder: where a made-up tokenizer is written.

    Raises:
        ConfigError, DataError: the folder cannot be used.
    """
    if name:
        found = resolve_model_folder(name)
        require_engine_model(found)
        tokens = find_tokenizer_folder(found, [])
        tokenizer = tokenizers.load_tokenizer(tokens)
        require_tokenizer_fits(load_config(found), tokenizer, tokens)
        model = load_model(found, device.torch_device, device.dtype, (), quantize)
        return model, tokenizer, f"{found}, {format_count(count_parameters(model)[0])} parameters"
    if quantize != "none":
        raise ConfigError(f"quantize is {quantize}, and the weights are random", "give --model FOLDER")
    tokenizer = tokenizers.load_tokenizer(synthetic_data.write_synthetic_tokenizer(folder))
    model = build_random_model(depth, len(tokenizer), device.torch_device, device.dtype)
    description = f"random weights, {depth} blocks of width {model.config.hidden_size}"
    return model, tokenizer, f"{description}, {format_count(count_parameters(model)[0])} parameters"


def build_random_model(depth: int, vocab_size: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a new Qwen3 as `anabatic pretrain` begins with."""
    dial = PretrainModel(depth=depth)
    model = build_meta_qwen3(derive_model_sizes(dial, vocab_size), dial, vocab_size, _MAX_POSITIONS)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    prepare_model(model, device)
    materialize_parameters(model, device, device)
    init_weights(model, 0)
    return model.eval()
