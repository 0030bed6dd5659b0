"""Shape of a job's model, from a folder's config.json, a public model's sizes or the dial of `pretrain`; which models
are supported. Where the time is given, how deep a new model becomes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from anabatic.config.loading import yaml_reader
from anabatic.config.pretrain import PretrainJob
from anabatic.core import formatting, json_reader, paths
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import RunFolder
from anabatic.device.table import Chip
from anabatic.plan import depth_dial
from anabatic.plan.model_format import describe_wrong_model
from anabatic.plan.shapes.config_shape import describe_unknown_family, read_shape
from anabatic.plan.shapes.config_values import MAX_SIZE, refuse_size
from anabatic.plan.shapes.decoder_shape import DecoderShape
from anabatic.plan.shapes.tower_shape import count_tower_params
from anabatic.plan.shapes.tower_sizes import read_tower_shape

DEFAULT_VOCAB_SIZE = 32_768
"""Vocabulary of a tokenizer that is not trained yet: the default of `anabatic tokenizer train`."""
TOKENS_PER_PARAM = 12.0
"""Training tokens per multiplying parameter (nanochat's compute-optimal ratio for this kind of model)."""
ASSUMED_UTILIZATION = 0.3
"""Share of a chip's peak, where only the order of magnitude is needed before the first step."""
MAX_DEPTH = 128
_MAX_JSON_BYTES = 256 << 20
"""Maximum size of a JSON file; tokenizers of large vocabularies have about 30 MiB."""
_MAX_ADAPTER_DEPTH = 4
"""An adapter names a model, which may be a run that made an adapter; more than that is a circle."""
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
    assumed = job.get_plan_facts().vocabulary
    if assumed is None:
        vocab, source = _count_vocabulary(job.tokenizer)
    else:
        vocab, source = assumed, f"{assumed:,} words, an assumption: the rows tell how many there are"
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
    return shape, f"model.depth {job.model.resolved_depth}, {source}"


def get_named_shape(model: str) -> tuple[DecoderShape, str]:
    """Return the shape of a model folder, or of a public model by its name."""
    folder = Path(model)
    if folder.is_dir():
        return _read_folder_shape(folder)
    name = _NAME_SUFFIXES.sub("", model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-"))
    if name in _load_public_shapes():
        shape, note = read_whole_shape(_load_public_shapes()[name], model)
        return shape, f"the published sizes of {name}" + (f"; {note}" if note else "")
    if folder.is_file():
        raise describe_wrong_model(folder)
    suggestion = paths.suggest_folder(model) or did_you_mean(name, _load_public_shapes())
    raise ConfigError(
        f"{model} is neither a folder here nor a model whose sizes are known.{suggestion}",
        "give a folder with its config.json; weights are not needed",
    )


def _read_folder_shape(folder: Path) -> tuple[DecoderShape, str]:
    folder = find_model_folder(folder)
    for _ in range(_MAX_ADAPTER_DEPTH):
        adapter = folder / ADAPTER_CONFIG_FILE
        if not adapter.is_file() or (folder / "config.json").is_file():
            break
        base = _read_json_object(adapter).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise DataError(f"{adapter} names no base model", "give the base model's folder")
        if not Path(base).is_dir():
            return get_named_shape(base)
        folder = find_model_folder(Path(base))
    else:
        raise DataError(f"{adapter} is an adapter of an adapter of itself", "give the base model's folder")
    file = folder / "config.json"
    if not file.is_file():
        raise DataError(f"{folder} has no config.json", "give the folder of a model; its weights are not needed")
    config = _read_json_object(file)
    require_text_decoder(config, str(file))
    shape, note = read_whole_shape(config, str(file))
    note = note or describe_unknown_family(config)
    return shape, f"{file}; {note}" if note else str(file)


def read_whole_shape(config: Mapping[str, Any], name: str) -> tuple[DecoderShape, str]:
    """Return the shape of a decoder, with its tower if it sees, and a note about that."""
    shape = read_shape(config, name)
    if not sees_pictures(config):
        return shape, ""
    if not packs_pictures(config):
        return shape, "with a tower, whose memory and time are not planned"
    shape = replace(shape, tower_params=count_tower_params(config), tower=read_tower_shape(config))
    unknown = "" if shape.tower else ", whose activations and time are not planned"
    return shape, f"with a tower of {formatting.format_count(shape.tower_params)} parameters{unknown}"


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > _MAX_JSON_BYTES:
            raise DataError(f"{file} has {formatting.format_size(size)}, too much for a description", "check the file")
        tree = json_reader.read_json_file(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}", "check the file") from None
    if not isinstance(tree, dict):
        raise DataError(f"{file} holds no JSON object", "check the file")
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


ADAPTER_CONFIG_FILE = "adapter_config.json"


def find_model_folder(path: Path) -> Path:
    """Return the folder of a model or an adapter: `path`, or the model inside a run folder."""
    run = RunFolder(path)
    candidates = (path, run.best_model, run.final_model)
    return next(
        (
            folder
            for folder in candidates
            if any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG_FILE))
        ),
        path,
    )


_TOWER_PATTERN = re.compile(r"(vision|visual|vit|image|img|video|audio|speech|sound|thinker|talker)(_|$)|^mm_|_tower$")
"""Keys of vision and audio towers: `vision_config` (Qwen-VL, Llava, InternVL, Gemma 3), `audio_config`,
`thinker_config` (Qwen-Omni), `visual` (the first Qwen-VL), `img_processor` (Phi-3-vision), `mm_vision_tower` (the
first Llava)."""
_ENCODER_TYPES = frozenset(
    ("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert")
    + ("modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl")
)
"""Values of model_type with bidirectional attention, unless `is_decoder` is set."""
_HINT = "use a decoder of text alone, such as Qwen3, Llama, Mistral, Gemma, GLM or Phi: its architecture ends in"
_DECODER = "ForCausalLM"
_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
)
_CLASSIFICATION = "ForSequenceClassification"
"""Architecture of models that return one number for a text: reward models of other programs."""


_SEEING_LAYERS = frozenset({"full_attention", "linear_attention"})
_TOWER_SIZES = ("patch_size", "temporal_patch_size", "spatial_merge_size")
_PICTURE_TOKENS = (
    ("image_token_id", "vision_start_token_id", "vision_end_token_id"),
    ("image_token_id", "image_start_token_id", "image_end_token_id"),
)
"""Keys of the tokens of a picture and those around it: of Qwen-VL, of GLM-V."""


def sees_pictures(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a model that reads pictures: it has a tower and a decoder of text."""
    return all(isinstance(config.get(key), Mapping) for key in ("vision_config", "text_config"))


def packs_pictures(config: Mapping[str, Any]) -> bool:
    """Return whether a model that sees is trained on packed rows; rows of others go through its own forward pass, one
    at a time.

    It reads pictures as Qwen-VL and GLM-V do, a grid of patches, squares of which become tokens, or as InternVL, in
    tiles of one size; its decoder's layers are attention or the delta rule."""
    tower, text = config.get("vision_config"), config.get("text_config")
    if not isinstance(tower, Mapping) or not isinstance(text, Mapping):
        return False
    others = [key for key, value in config.items() if key != "vision_config" and value and _is_tower(key, value)]
    has_sizes = all(type(tower.get(key)) is int for key in _TOWER_SIZES)
    has_tokens = any(all(type(config.get(key)) is int for key in keys) for keys in _PICTURE_TOKENS)
    ratio = config.get("downsample_ratio")
    has_tiles = type(config.get("image_token_id")) is int and type(ratio) is float and 0.1 <= ratio <= 1
    kinds = text.get("layer_types") or ()
    return (
        (has_sizes and has_tokens or has_tiles and "image_size" in tower)
        and not others
        and _SEEING_LAYERS.issuperset(kinds)
    )


def require_text_decoder(config: Mapping[str, Any], name: str) -> None:
    """Reject a model that is not a decoder of text, which may see pictures if it is of a kind that is trained here.

    Args:
        name: name of the config.json, for the message.

    Raises:
        DataError: it is of another kind, or has an invalid size.
    """
    if sees_pictures(config):
        return require_text_decoder(config["text_config"], name)
    for key in _SIZE_KEYS:
        size = config.get(key)
        if isinstance(size, int) and not 0 < size <= MAX_SIZE:
            refuse_size(config, key, name)
    architectures = config.get("architectures")
    class_names = (
        [class_name for class_name in architectures if isinstance(class_name, str)]
        if isinstance(architectures, list)
        else []
    )
    model_name = class_names[0] if class_names else str(config.get("model_type") or "the model")
    if towers := [key for key, value in config.items() if value and _is_tower(key, value)]:
        raise DataError(
            f"{name}: {model_name} reads pictures, video or sound ({', '.join(towers[:3])}), which is not supported",
            f"{_HINT} {_DECODER}; of some such models the text part is published alone",
        )
    if config.get("is_encoder_decoder") is True:
        raise DataError(
            f"{name}: {model_name} is an encoder with a decoder, which is not supported", f"{_HINT} {_DECODER}"
        )
    is_masked_lm = any(class_name.endswith("ForMaskedLM") for class_name in class_names)
    is_encoder = str(config.get("model_type")) in _ENCODER_TYPES and not config.get("is_decoder")
    if (
        is_masked_lm
        or is_encoder
        and not any(class_name.endswith((_DECODER, _CLASSIFICATION)) for class_name in class_names)
    ):
        raise DataError(
            f"{name}: {model_name} is an encoder, which writes no text: not supported", f"{_HINT} {_DECODER}"
        )


def _is_tower(key: str, value: Any) -> bool:
    """Return whether a key configures a tower: its value is an object or a name; `vision_start_token_id` is a token."""
    if key.endswith(("_token_id", "_token_index", "_token")) or not _TOWER_PATTERN.search(key):
        return False
    return isinstance(value, Mapping) or (isinstance(value, str) and key.endswith("_tower"))


def require_supported_folder(folder: Path) -> None:
    """Reject an unsupported model folder; for an adapter its base model.

    A missing folder (a hub id) or an unreadable file is not an error here: later code reports it.

    Raises:
        DataError: the model is not supported.
    """
    model_folder = find_model_folder(folder)
    config = _read_config_if_there(model_folder / "config.json")
    if config is None and (adapter := _read_config_if_there(model_folder / ADAPTER_CONFIG_FILE)) is not None:
        base = adapter.get("base_model_name_or_path")
        if isinstance(base, str) and base and Path(base).is_dir():
            model_folder = find_model_folder(Path(base))
            config = _read_config_if_there(model_folder / "config.json")
    if config is not None:
        require_text_decoder(config, str(model_folder / "config.json"))


def require_supported_job(tree: Mapping[str, Any]) -> None:
    """Reject unsupported models of the settings of a job before a heavy library is loaded.

    Raises:
        DataError: a model is not supported.
    """
    for path in _iter_model_paths(tree):
        if (folder := Path(path).expanduser()).is_dir():
            require_supported_folder(folder)


def _iter_model_paths(tree: Mapping[str, Any]) -> Iterator[str]:
    models = tree.get("model")
    for model in models if isinstance(models, list) else [models]:
        if isinstance(model, Mapping):
            model = model.get("path")
        if isinstance(model, str) and model:
            yield model


def _read_config_if_there(file: Path) -> dict[str, Any] | None:
    try:
        tree = json_reader.read_json_file(file)
    except (OSError, ValueError):  # reported with its path by the code that needs the file
        return None
    return tree if isinstance(tree, dict) else None


def is_depth_left_open(job: Any) -> bool:
    """Return whether the depth of a new model follows from `schedule.minutes`."""
    return (
        isinstance(job, PretrainJob)
        and job.model.path is None
        and job.model.depth is None
        and job.schedule.minutes is not None
    )


def choose_depth(job: PretrainJob, chip: Chip, devices: int) -> int:
    """Return the largest depth whose model gets its tokens in `schedule.minutes`, 1 at least.

    A token costs 6 operations per multiplying parameter (arXiv 2001.08361, section 2.1). The speed is the chip's peak
    by its data sheet, so that a machine comes to the same depth each time.

    Args:
        devices: chips that share the work.
    """
    minutes = job.schedule.minutes
    assert minutes is not None
    operations = 60.0 * minutes * chip.half_tflops * 1e12 * ASSUMED_UTILIZATION * devices
    ratio = job.schedule.tokens_per_param or TOKENS_PER_PARAM
    depth = 1
    while depth < MAX_DEPTH:
        params = get_job_shape(with_depth(job, depth + 1))[0].multiplying_params
        if operations < 6 * params * ratio * params:
            break
        depth += 1
    return depth


def with_depth(job: PretrainJob, depth: int) -> PretrainJob:
    """Return the job with this depth."""
    return replace(job, model=replace(job.model, depth=depth))
