"""Which shape a job's model has: a folder's config.json, a public model's sizes, or the dial of `pretrain`."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from anabatic.config import yaml_file
from anabatic.config.classify_train import WordsJob
from anabatic.core import json_text, run_names, text
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.model_files import no_model
from anabatic.core.text import did_you_mean
from anabatic.plan import depth, shape
from anabatic.plan.shape import Shape
from anabatic.plan.supported import require_text_decoder

USUAL_VOCABULARY = 32_768
"""Of a tokenizer that is not trained yet: the default of `anabatic tokenizer train`."""
USUAL_WORDS = 4096
"""Different words of trajectories: an assumption, coarse cells of a coast make some thousands."""
_MOST_BYTES = 256 << 20
"""Of a JSON file that is read; tokenizers of large vocabularies have some 30 MiB."""
_ENDINGS = re.compile(r"-(instruct|chat|base|hf)\b.*$")


@cache
def _public() -> dict[str, dict[str, Any]]:
    file = resources.files("anabatic.plan") / "models.yaml"
    return yaml_file.read(str(file)).tree


def of_job(job: Any) -> tuple[Shape, str]:
    """Return the shape and where it is from.

    Raises:
        ConfigError, DataError: the model is not known here, or its config.json cannot be used.
    """
    if isinstance(job.model, str):
        return named(job.model)
    if job.model.path:
        return named(job.model.path)
    if isinstance(job, WordsJob):
        vocab, source = USUAL_WORDS, f"{USUAL_WORDS:,} words, an assumption: the rows tell how many there are"
    else:
        vocab, source = _vocabulary(job.tokenizer)
    plan = depth.shape(job.model, vocab)
    sizes = {name: plan.integer(name) for name in ("depth", "width", "heads", "kv_heads", "head_dim", "intermediate")}
    found = Shape(
        vocab, sizes["width"], sizes["depth"], sizes["heads"], sizes["kv_heads"], sizes["head_dim"],
        sizes["intermediate"], tied=bool(plan.values["tie_embeddings"]), head_norms=True,
    )  # fmt: skip
    return found, f"model.depth {job.model.depth}, {source}"


def named(model: str) -> tuple[Shape, str]:
    """Return the shape of a folder, or of a public model by its name."""
    folder = Path(model)
    if folder.is_dir():
        return _of_folder(folder)
    name = _ENDINGS.sub("", model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-"))
    if name in _public():
        return shape.read(_public()[name], model), f"the published sizes of {name}"
    if folder.is_file():
        raise no_model(folder)
    guess = run_names.guess(model) or did_you_mean(name, _public())
    raise ConfigError(
        f"{model} is neither a folder here nor a model whose sizes are known.{guess}",
        "give a folder with its config.json; weights are not needed",
    )


def _of_folder(folder: Path) -> tuple[Shape, str]:
    folder = shape.folder_of(folder)
    adapter = folder / shape.ADAPTER
    if adapter.is_file() and not (folder / "config.json").is_file():
        base = _json(adapter).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise DataError(f"{adapter} names no base model", "give the base model's folder")
        return named(base)
    file = folder / "config.json"
    if not file.is_file():
        raise DataError(f"{folder} has no config.json", "give the folder of a model; its weights are not needed")
    config = _json(file)
    require_text_decoder(config, str(file))
    told = shape.strange(config)
    return shape.read(config, str(file)), f"{file}; {told}" if told else str(file)


def _json(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise DataError(f"{file} has {text.size(size)}, too much for a description", "look at the file")
        found = json_text.read(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", "look at the file") from None
    if not isinstance(found, dict):
        raise DataError(f"{file} holds no JSON object", "look at the file")
    return found


def _vocabulary(tokenizer: str | None) -> tuple[int, str]:
    file = Path(tokenizer or "") / "tokenizer.json"
    if tokenizer is None or not file.is_file():
        return USUAL_VOCABULARY, f"{USUAL_VOCABULARY:,} words, as the tokenizer is not there yet"
    found = _json(file)
    model, added = found.get("model"), found.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(words, (dict, list)):
        raise DataError(f"{file} has no vocabulary", "give a folder of `anabatic tokenizer train`")
    own = {one.get("content") for one in added or [] if isinstance(one, dict)} - set(
        words if isinstance(words, dict) else ()
    )
    size = len(words) + len(own)
    return size, f"{size:,} words of {file}"
