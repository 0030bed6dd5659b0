"""Check from config.json whether a model is supported, before anything is loaded. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.plan.decoder_shape import ADAPTER_CONFIG_FILE, MAX_SIZE, find_model_folder, refuse_size

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


def require_text_decoder(config: Mapping[str, Any], name: str) -> None:
    """Reject a model that is not a text-only decoder.

    Args:
        name: name of the config.json, for the message.

    Raises:
        DataError: it reads pictures, video or sound, is an encoder or encoder-decoder, or has an invalid size.
    """
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
    config = _read_json_object(model_folder / "config.json")
    if config is None and (adapter := _read_json_object(model_folder / ADAPTER_CONFIG_FILE)) is not None:
        base = adapter.get("base_model_name_or_path")
        if isinstance(base, str) and base and Path(base).is_dir():
            model_folder = find_model_folder(Path(base))
            config = _read_json_object(model_folder / "config.json")
    if config is not None:
        require_text_decoder(config, str(model_folder / "config.json"))


def require_supported_job(tree: Mapping[str, Any]) -> None:
    """Reject unsupported models of a job's settings before a heavy library is loaded.

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


def _read_json_object(file: Path) -> dict[str, Any] | None:
    try:
        tree = json_reader.read_json_file(file)
    except (OSError, ValueError):  # reported with its path by the code that needs the file
        return None
    return tree if isinstance(tree, dict) else None
