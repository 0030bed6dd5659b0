"""`anabatic merge`: adapters and their model become one model."""

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
from anabatic.models.hf import below, is_adapter, load_config, load_model, resolve, save_model, tokenizer_folder


def run(job: MergeJob) -> None:
    """Merge on the CPU, in the number format of the base model's files, and write the folder.

    Raises:
        ConfigError: there is no adapter, or `out` exists.
        DataError: an adapter or the base model cannot be read.
        Failure: the folder cannot be written.
    """
    out = Path(job.out).expanduser()
    if out.exists():
        raise ConfigError(f"{out} exists already", "choose another --out")
    folder = resolve(job.model)
    shares = below(job.adapter, folder)
    if not is_adapter(folder) and not shares:
        what = f"{folder} is no adapter: there is nothing to merge"
        raise ConfigError(what, "give the folder with adapter_config.json, or name some with --adapter")
    named = load_config(folder).dtype
    dtype = named if isinstance(named, torch.dtype) else torch.float32
    model = load_model(folder, torch.device("cpu"), dtype, shares)
    number = len(shares) + is_adapter(folder)
    what = f"{number} adapter{'' if number == 1 else 's'}"
    save_model(adapter.merge(model), out, tokenizers.load(tokenizer_folder(folder, shares)))
    log.info(f"merged {what}; wrote {count(count_parameters(model)[0])} parameters as {dtype} to {out}")
