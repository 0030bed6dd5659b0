"""`anabatic merge`: an adapter and its model become one model."""

from __future__ import annotations

from pathlib import Path

import torch

from anabatic.config.merge import MergeJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.text import count
from anabatic.data import tokenizer as tokenizers
from anabatic.models import adapter
from anabatic.models.build import count_parameters
from anabatic.models.hf import is_adapter, load_config, load_model, resolve, save_model


def run(job: MergeJob) -> None:
    """Merge on the CPU, in the number format of the base model's files, and write the folder.

    Raises:
        ConfigError: the model is no adapter, or `out` exists.
        DataError: the adapter or its base model cannot be read.
        Failure: the folder cannot be written.
    """
    out = Path(job.out).expanduser()
    if out.exists():
        raise ConfigError(f"{out} exists already", "choose another --out")
    folder = resolve(job.model)
    if not is_adapter(folder):
        what = f"{folder} is no adapter: there is nothing to merge"
        raise ConfigError(what, "give the folder with adapter_config.json")
    named = load_config(folder).dtype
    dtype = named if isinstance(named, torch.dtype) else torch.float32
    model = load_model(folder, torch.device("cpu"), dtype)
    layers = len(adapter.layers(model))
    save_model(adapter.merge(model), out, tokenizers.load(folder))
    log.info(f"merged {layers} layers; wrote {count(count_parameters(model)[0])} parameters as {dtype} to {out}")
