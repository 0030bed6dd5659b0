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
from anabatic.core.paths import require_space
from anabatic.core.text import count, size
from anabatic.device.device import DTYPES
from anabatic.models import portable
from anabatic.models.build import count_parameters
from anabatic.models.hf import chat_ids, save_model, skeleton
from anabatic.recipes import export_gguf, export_serving, outputs
from anabatic.recipes.whole import Parts, parts_of

LICENSES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files of the base model that whoever passes it on passes on, too."""
_SPARE = 1.02
_BESIDE = 64 << 20
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
    outputs.require_replaceable(out, job.overwrite)
    converter = export_gguf.find(job.llama_cpp) if job.gguf != "none" else []
    parts = parts_of(job.model, job.adapter)
    _require_apart(out, parts)
    export_serving.require_division(parts.config, job.devices)
    context = export_serving.context_of(parts.config, job.context)
    tokenizer = parts.tokenizer()
    dtype = parts.dtype if job.dtype == "auto" else DTYPES[job.dtype]
    _require_space(out, parts, dtype, job)
    if converter:
        export_gguf.require(converter)
    name = job.name or export_serving.plain_name(out)
    gguf = f"{name}-{job.gguf}.gguf" if job.gguf != "none" else None
    told = next(key for key, value in DTYPES.items() if value == dtype)
    model = parts.model(dtype)
    generation = portable.generation(parts.base, chat_ids(tokenizer))
    made = export_serving.Exported(
        out, name, told, parts.config, tokenizer, generation, gguf, job.devices, context
    )  # fmt: skip
    notes: list[str] = []

    def complete(folder: Path) -> None:
        portable.with_template(folder)
        (folder / portable.GENERATION).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        for pattern in LICENSES:
            for path in parts.base.glob(pattern):
                shutil.copyfile(path, folder / path.name)
        if gguf is not None:
            export_gguf.convert(converter, folder, job.gguf, folder / gguf)
        notes.extend(export_serving.write(folder, list(job.recipes), made))

    save_model(model, out, tokenizer, True, complete, int(job.shard_gib * 2**30))
    _tell(out, parts, count_parameters(model)[0], told, notes)


def _require_apart(out: Path, parts: Parts) -> None:
    target = out.resolve()
    for folder in parts.folders:
        source = folder.resolve()
        if target == source or target in source.parents:
            raise ConfigError(f"{out} holds {folder}, which is read", "choose another -o FOLDER")


def _require_space(out: Path, parts: Parts, dtype: torch.dtype, job: ExportJob) -> None:
    """The old folder, if there is one, stays until the new one is whole."""
    parameters = count_parameters(skeleton(parts.base, dtype))[0]
    width = dtype.itemsize + (export_gguf.BYTES[job.gguf] if job.gguf != "none" else 0.0)
    require_space(out, _SPARE * parameters * width + _BESIDE, "choose another disk with -o FOLDER")


def _tell(out: Path, parts: Parts, parameters: int, dtype: str, notes: list[str]) -> None:
    files = sorted(path for path in out.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in files)
    merged = f", {parts.adapters} adapter{'s' if parts.adapters > 1 else ''} merged" if parts.adapters else ""
    log.info(f"{out}: {parameters:,} parameters ({count(parameters)}) as {dtype}{merged}, {size(total)}")
    log.info("  " + ", ".join(path.relative_to(out).as_posix() for path in files))
    for note in notes:
        log.warn(note)
