"""The model of a measurement: a folder's, or one with random weights and made-up words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from anabatic.bench import synthetic
from anabatic.config.pretrain import Model
from anabatic.core.errors import ConfigError
from anabatic.core.text import count
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import Device
from anabatic.models.build import blank, count_parameters, initialise
from anabatic.models.hf import load_config, load_model, prepare, require_fit, resolve, tokenizer_folder
from anabatic.parallel.sharded import materialise
from anabatic.plan.depth import shape

_POSITIONS = 8192


def loaded(
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
        found = resolve(name)
        tokens = tokenizer_folder(found, [])
        tokenizer = tokenizers.load(tokens)
        require_fit(load_config(found), tokenizer, tokens)
        model = load_model(found, device.torch, device.dtype, (), quantize)
        return model, tokenizer, f"{found}, {count(count_parameters(model)[0])} parameters"
    if quantize != "none":
        raise ConfigError(f"quantize is {quantize}, and the weights are random", "give --model FOLDER")
    tokenizer = tokenizers.load(synthetic.tokenizer(folder))
    model = random(depth, len(tokenizer), device.torch, device.dtype)
    made = f"random weights, {depth} blocks of width {model.config.hidden_size}"
    return model, tokenizer, f"{made}, {count(count_parameters(model)[0])} parameters"


def random(depth: int, vocab_size: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a new Qwen3 as `anabatic pretrain` begins with."""
    dial = Model(depth=depth)
    model = blank(shape(dial, vocab_size), dial, vocab_size, _POSITIONS)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    prepare(model, device)
    materialise(model, device, device)
    initialise(model, 0)
    return model.eval()
