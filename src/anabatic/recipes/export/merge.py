"""`anabatic merge`: merge LoRA adapters into their base model. `anabatic export` does that too, and more."""

from __future__ import annotations

from pathlib import Path

from anabatic.config.export import MergeJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count
from anabatic.models.model_init import count_parameters
from anabatic.models.pretrained import save_model
from anabatic.recipes.export.merged_model import find_merged_model
from anabatic.recipes.prechecks import data_files


def run(job: MergeJob) -> None:
    """Merge on the CPU, in the number format of the base model's files, and write the folder.

    Raises:
        ConfigError: there is no adapter, or `out` exists.
        DataError: an adapter or the base model cannot be read.
        Failure: the folder cannot be written.
    """
    out = Path(job.out).expanduser()
    data_files.require_new_output(out)
    parts = find_merged_model(job.model, job.adapter)
    if not parts.num_adapters:
        what = f"{parts.named_folder} is no adapter: there is nothing to merge"
        raise ConfigError(what, "give the folder with adapter_config.json, or name some with --adapter")
    model = parts.load_merged_model(parts.dtype)
    save_model(model, out, parts.load_tokenizer(), write_extra=parts.copy_picture_files)
    what = f"{parts.num_adapters} adapter{'' if parts.num_adapters == 1 else 's'}"
    log.info(f"merged {what}; wrote {format_count(count_parameters(model)[0])} parameters as {parts.dtype} to {out}")
