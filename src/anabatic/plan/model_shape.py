"""Shape of a job's model: from the config.json of a folder, the sizes of a public model, or the dial of `pretrain`."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from anabatic.config.loading import yaml_reader
from anabatic.config.vessels.train import WordsJob
from anabatic.core import formatting, json_reader, run_lookup
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean
from anabatic.core.model_format import describe_wrong_model
from anabatic.plan import decoder_shape, depth_dial
from anabatic.plan.decoder_shape import DecoderShape
from anabatic.plan.supported_models import require_text_decoder

DEFAULT_VOCAB_SIZE = 32_768
"""Vocabulary of a tokenizer that is not trained yet: the default of `anabatic tokenizer train`."""
DEFAULT_WORD_COUNT = 4096
"""Assumed number of distinct vessel words; coarse cells of a coast give some thousands."""
_MAX_JSON_BYTES = 256 << 20
"""Maximum size of a JSON file; tokenizers of large vocabularies have about 30 MiB."""
_NAME_SUFFIXES = re.compile(r"-(instruct|chat|base|hf)\b.*$")


@cache
def _load_public_shapes() -> dict[str, dict[str, Any]]:
    file = resources.files("anabatic.plan") / "models.yaml"
    return yaml_reader.read_yaml(str(file)).tree


def get_job_shape(job: Any) -> tuple[DecoderShape, str]:
    """Return the shape and its source.

    Raises:
        ConfigError, DataError: the model is unknown, or its config.json cannot be used.
    """
    if isinstance(job.model, str):
        return get_named_shape(job.model)
    if job.model.path:
        return get_named_shape(job.model.path)
    if isinstance(job, WordsJob):
        vocab, source = (
            DEFAULT_WORD_COUNT,
            f"{DEFAULT_WORD_COUNT:,} words, an assumption: the rows tell how many there are",
        )
    else:
        vocab, source = _count_vocabulary(job.tokenizer)
    derived = depth_dial.derive_model_sizes(job.model, vocab)
    sizes = {
        name: derived.get_int(name) for name in ("depth", "width", "heads", "kv_heads", "head_dim", "intermediate")
    }
    shape = DecoderShape(
        vocab,
        sizes["width"],
        sizes["depth"],
        sizes["heads"],
        sizes["kv_heads"],
        sizes["head_dim"],
        sizes["intermediate"],
        is_tied=bool(derived.values["tie_embeddings"]),
        head_norms=True,
    )
    return shape, f"model.depth {job.model.depth}, {source}"


def get_named_shape(model: str) -> tuple[DecoderShape, str]:
    """Return the shape of a model folder, or of a public model by its name."""
    folder = Path(model)
    if folder.is_dir():
        return _read_folder_shape(folder)
    name = _NAME_SUFFIXES.sub("", model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-"))
    if name in _load_public_shapes():
        return decoder_shape.read_shape(_load_public_shapes()[name], model), f"the published sizes of {name}"
    if folder.is_file():
        raise describe_wrong_model(folder)
    suggestion = run_lookup.suggest_folder(model) or did_you_mean(name, _load_public_shapes())
    raise ConfigError(
        f"{model} is neither a folder here nor a model whose sizes are known.{suggestion}",
        "give a folder with its config.json; weights are not needed",
    )


def _read_folder_shape(folder: Path) -> tuple[DecoderShape, str]:
    folder = decoder_shape.find_model_folder(folder)
    adapter = folder / decoder_shape.ADAPTER_CONFIG_FILE
    if adapter.is_file() and not (folder / "config.json").is_file():
        base = _read_json_object(adapter).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise DataError(f"{adapter} names no base model", "give the base model's folder")
        return get_named_shape(base)
    file = folder / "config.json"
    if not file.is_file():
        raise DataError(f"{folder} has no config.json", "give the folder of a model; its weights are not needed")
    config = _read_json_object(file)
    require_text_decoder(config, str(file))
    note = decoder_shape.describe_unknown_family(config)
    return decoder_shape.read_shape(config, str(file)), f"{file}; {note}" if note else str(file)


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > _MAX_JSON_BYTES:
            raise DataError(
                f"{file} has {formatting.format_size(size)}, too much for a description", "look at the file"
            )
        tree = json_reader.read_json_file(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", "look at the file") from None
    if not isinstance(tree, dict):
        raise DataError(f"{file} holds no JSON object", "look at the file")
    return tree


def _count_vocabulary(tokenizer: str | None) -> tuple[int, str]:
    file = Path(tokenizer or "") / "tokenizer.json"
    if tokenizer is None or not file.is_file():
        return DEFAULT_VOCAB_SIZE, f"{DEFAULT_VOCAB_SIZE:,} words, as the tokenizer is not there yet"
    tree = _read_json_object(file)
    model, added = tree.get("model"), tree.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, (dict, list)):
        raise DataError(f"{file} has no vocabulary", "give a folder of `anabatic tokenizer train`")
    new_tokens = {token.get("content") for token in added or [] if isinstance(token, dict)} - set(
        vocab if isinstance(vocab, dict) else ()
    )
    size = len(vocab) + len(new_tokens)
    return size, f"{size:,} words of {file}"
