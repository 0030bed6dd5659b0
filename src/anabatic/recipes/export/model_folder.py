"""`anabatic export`: a model as a folder that other programs load and serve.

What `merge` does is the first half of it: adapters become part of the weights. Here the folder is completed (generation
settings of the base model, the chat template in both places, older names), checked against the disk, and gets a GGUF
file and recipes where they are wanted.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from anabatic.config.export import ExportJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count, format_size
from anabatic.core.paths import require_space
from anabatic.device.device import DTYPES
from anabatic.models import weights_reader
from anabatic.models.model_init import count_parameters
from anabatic.models.pretrained import build_meta_causal_lm, get_chat_token_ids, save_model
from anabatic.recipes.export import gguf_converter, serving_configs
from anabatic.recipes.export.merged_model import MergedModel, find_merged_model
from anabatic.recipes.prechecks import data_files

LICENSE_PATTERNS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files of the base model that whoever passes it on passes on, too."""
_SPACE_MARGIN = 1.02
_SMALL_FILES_BYTES = 64 << 20
"""Tokenizer and small files."""


def run(job: ExportJob) -> None:
    """Export as the job says.

    Raises:
        ConfigError: `out` exists and is not to be replaced, the model is none that others know, or the converter of
            llama.cpp is not there.
        DataError: the model or its tokenizer cannot be used.
        Failure: the disk is too small or refuses writes, or the converter fails. Nothing is left behind.
    """
    out = Path(job.out).expanduser()
    data_files.require_replaceable_output(out, job.overwrite)
    parts = find_merged_model(job.model, job.adapter)
    recipes = _choose_recipes(job, parts)
    converter = gguf_converter.find_converter(job.llama_cpp) if job.gguf != "none" else []
    _require_separate_folders(out, parts)
    serving_configs.require_divisible_heads(parts.config, job.devices)
    context = serving_configs.resolve_context_length(parts.config, job.context)
    tokenizer = parts.load_tokenizer()
    dtype = parts.dtype if job.dtype == "auto" else DTYPES[job.dtype]
    _require_disk_space(out, parts, dtype, job)
    if converter:
        gguf_converter.require_converter_starts(converter)
    name = job.name or serving_configs.safe_model_name(out)
    gguf = f"{name}-{job.gguf}.gguf" if job.gguf != "none" else None
    dtype_name = next(key for key, value in DTYPES.items() if value == dtype)
    model = parts.load_merged_model(dtype)
    generation = weights_reader.merge_generation_config(parts.base_folder, get_chat_token_ids(tokenizer))
    export_info = serving_configs.ExportInfo(
        out, name, dtype_name, parts.config, tokenizer, generation, gguf, job.devices, context
    )
    notes: list[str] = []

    def complete_folder(folder: Path) -> None:
        weights_reader.embed_chat_template(folder)
        (folder / weights_reader.GENERATION_CONFIG_FILE).write_text(
            json.dumps(generation, indent=2) + "\n", encoding="utf-8"
        )
        for pattern in LICENSE_PATTERNS:
            for path in parts.base_folder.glob(pattern):
                shutil.copyfile(path, folder / path.name)
        parts.copy_picture_files(folder)
        if gguf is not None:
            gguf_converter.convert_to_gguf(converter, folder, job.gguf, folder / gguf)
        notes.extend(serving_configs.write_serving_configs(folder, recipes, export_info))

    save_model(model, out, tokenizer, True, complete_folder, int(job.shard_gib * 2**30))
    _log_export(out, parts, count_parameters(model)[0], dtype_name, notes)


def _choose_recipes(job: ExportJob, parts: MergedModel) -> list[str]:
    """Return the servers to write recipes for: of a model that sees not Ollama, which reads it as GGUF alone.

    Raises:
        ConfigError: a GGUF file of a model that sees is asked for.
    """
    if not parts.sees_pictures:
        return list(job.recipes)
    if job.gguf != "none":
        raise ConfigError(
            f"{parts.named_folder} reads pictures: llama.cpp keeps its tower in a second file, which is not written",
            "use --format vllm, whose folder vLLM and transformers load",
        )
    if "ollama" in job.recipes:
        log.info("no Modelfile: Ollama reads models that see from GGUF files, which are not written")
    return [name for name in job.recipes if name != "ollama"]


def _require_separate_folders(out: Path, parts: MergedModel) -> None:
    target = out.resolve()
    for folder in parts.source_folders:
        source = folder.resolve()
        if target == source or target in source.parents:
            raise ConfigError(f"{out} holds {folder}, which is read", "choose another -o FOLDER")


def _require_disk_space(out: Path, parts: MergedModel, dtype: torch.dtype, job: ExportJob) -> None:
    """Require space for the new folder beside the old one, which is kept until the new one is complete."""
    parameters = count_parameters(build_meta_causal_lm(parts.base_folder, dtype))[0]
    width = dtype.itemsize + (gguf_converter.BYTES_PER_PARAMETER[job.gguf] if job.gguf != "none" else 0.0)
    require_space(out, _SPACE_MARGIN * parameters * width + _SMALL_FILES_BYTES, "choose another disk with -o FOLDER")


def _log_export(out: Path, parts: MergedModel, parameters: int, dtype: str, notes: list[str]) -> None:
    files = sorted(path for path in out.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in files)
    merged = (
        f", {parts.num_adapters} adapter{'s' if parts.num_adapters > 1 else ''} merged" if parts.num_adapters else ""
    )
    log.info(f"{out}: {parameters:,} parameters ({format_count(parameters)}) as {dtype}{merged}, {format_size(total)}")
    log.info("  " + ", ".join(path.relative_to(out).as_posix() for path in files))
    for note in notes:
        log.warn(note)
