"""Which models can be trained and asked here, told by their config.json before anything is loaded. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.plan.decoder_shape import ADAPTER_CONFIG_FILE, MAX_SIZE, find_model_folder, refuse_size

_TOWER_PATTERN = re.compile(r"(vision|visual|vit|image|img|video|audio|speech|sound|thinker|talker)(_|$)|^mm_|_tower$")
"""Names of what reads pictures or sound: `vision_config` (Qwen-VL, Llava, InternVL, Gemma 3), `audio_config`,
`thinker_config` (Qwen-Omni), `visual` (the first Qwen-VL), `img_processor` (Phi-3-vision), `mm_vision_tower` (the
first Llava)."""
_ENCODER_TYPES = frozenset(
    ("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert")
    + ("modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl")
)
"""Values of model_type whose tokens see what comes after them, unless `is_decoder` says otherwise."""
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
"""Encoders that give one number for a text: reward models of others."""


def require_text_decoder(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that is not a decoder of text alone.

    Args:
        name: of the config.json, for the message.

    Raises:
        DataError: it reads pictures, video or sound, is an encoder, or an encoder with a decoder; or a size is none.
    """
    for key in _SIZE_KEYS:
        size = config.get(key)
        if isinstance(size, int) and not 0 < size <= MAX_SIZE:
            refuse_size(config, key, name)
    architectures = config.get("architectures")
    named = [one for one in architectures if isinstance(one, str)] if isinstance(architectures, list) else []
    called = named[0] if named else str(config.get("model_type") or "the model")
    if towers := [key for key, value in config.items() if value and _is_tower(key, value)]:
        raise DataError(
            f"{name}: {called} reads pictures, video or sound ({', '.join(towers[:3])}), which is not supported",
            f"{_HINT} {_DECODER}; of some such models the text part is published alone",
        )
    if config.get("is_encoder_decoder") is True:
        raise DataError(f"{name}: {called} is an encoder with a decoder, which is not supported", f"{_HINT} {_DECODER}")
    masked = any(one.endswith("ForMaskedLM") for one in named)
    encodes = str(config.get("model_type")) in _ENCODER_TYPES and not config.get("is_decoder")
    if masked or encodes and not any(one.endswith((_DECODER, _CLASSIFICATION)) for one in named):
        raise DataError(f"{name}: {called} is an encoder, which writes no text: not supported", f"{_HINT} {_DECODER}")


def _is_tower(key: str, value: Any) -> bool:
    """Settings of a tower are an object, a name, or true; numbers such as `vision_start_token_id` name tokens."""
    if key.endswith(("_token_id", "_token_index", "_token")) or not _TOWER_PATTERN.search(key):
        return False
    return isinstance(value, Mapping) or (isinstance(value, str) and key.endswith("_tower"))


def require_supported_folder(folder: Path) -> None:
    """Refuse a model's folder as `require_text_decoder` does; for an adapter the model that it was made for.

    A folder that is not here (a hub's name) or whose file cannot be read is left to whoever reads it next.

    Raises:
        DataError: the model is not supported.
    """
    found = find_model_folder(folder)
    config = _read_json_object(found / "config.json")
    if config is None and (adapter := _read_json_object(found / ADAPTER_CONFIG_FILE)) is not None:
        base = adapter.get("base_model_name_or_path")
        if isinstance(base, str) and base and Path(base).is_dir():
            found = find_model_folder(Path(base))
            config = _read_json_object(found / "config.json")
    if config is not None:
        require_text_decoder(config, str(found / "config.json"))


def require_supported_job(tree: Mapping[str, Any]) -> None:
    """Refuse the models of a job, as its settings name them, before a heavy library is loaded.

    Raises:
        DataError: one is not supported.
    """
    for path in _iter_model_paths(tree):
        if (folder := Path(path).expanduser()).is_dir():
            require_supported_folder(folder)


def _iter_model_paths(tree: Mapping[str, Any]) -> Iterator[str]:
    given = tree.get("model")
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, Mapping):
            one = one.get("path")
        if isinstance(one, str) and one:
            yield one


def _read_json_object(file: Path) -> dict[str, Any] | None:
    try:
        found = json_reader.read_json_file(file)
    except (OSError, ValueError):  # told with its place by whoever needs the file
        return None
    return found if isinstance(found, dict) else None
