"""`anabatic merge`: adapters and their model become one model. `anabatic export` does that too, and more."""

from __future__ import annotations

from pathlib import Path

from anabatic.config.merge import MergeJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.text import count
from anabatic.models.build import count_parameters
from anabatic.models.hf import save_model
from anabatic.recipes import outputs
from anabatic.recipes.whole import parts_of


def run(job: MergeJob) -> None:
    """Merge on the CPU, in the number format of the base model's files, and write the folder.

    Raises:
        ConfigError: there is no adapter, or `out` exists.
        DataError: an adapter or the base model cannot be read.
        Failure: the folder cannot be written.
    """
    out = Path(job.out).expanduser()
    outputs.require_new(out)
    parts = parts_of(job.model, job.adapter)
    if not parts.adapters:
        what = f"{parts.named} is no adapter: there is nothing to merge"
        raise ConfigError(what, "give the folder with adapter_config.json, or name some with --adapter")
    model = parts.model(parts.dtype)
    save_model(model, out, parts.tokenizer())
    what = f"{parts.adapters} adapter{'' if parts.adapters == 1 else 's'}"
    log.info(f"merged {what}; wrote {count(count_parameters(model)[0])} parameters as {parts.dtype} to {out}")
