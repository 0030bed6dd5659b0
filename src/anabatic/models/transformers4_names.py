"""Make model folders written by transformers 5 readable for older programs.

transformers 5 renamed keys of its files. Programs built on transformers 4, such as serving engines, do not know the new
names: they silently use a default rotary base, which gives a wrong model, or fail at the tokenizer's class. Both names
are written; transformers 5 reads either (`configuration_utils.py`, `modeling_rope_utils.py` and
`tokenization_utils_base.py` of 5.23).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anabatic.models.weights_reader import read_json_object

CONFIG_FILE, TOKENIZER_CONFIG_FILE, GENERATION_CONFIG_FILE = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
)
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class name, known to both versions, of a tokenizer that is fully described by `tokenizer.json`."""
_LOCAL_KEYS = ("is_local", "local_files_only")
"""Keys about how the tokenizer was loaded here, unrelated to the model."""


def write_older_names(folder: Path) -> None:
    """Add the older names to the files of a folder, and set the same permissions on all weight files."""
    _rewrite_json(folder / CONFIG_FILE, to_older_config)
    _rewrite_json(folder / TOKENIZER_CONFIG_FILE, to_older_tokenizer)
    mode = (folder / CONFIG_FILE).stat().st_mode & 0o777
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)  # safetensors writes files that other users cannot read


def _rewrite_json(path: Path, convert: Any) -> None:
    path.write_text(json.dumps(convert(read_json_object(path)), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def to_older_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config.json` with `torch_dtype`, `rope_theta` and `rope_scaling` in addition to their newer names."""
    older = dict(config)
    if "dtype" in older:
        older["torch_dtype"] = older["dtype"]
    rope = older.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if "rope_theta" in rope:
            older["rope_theta"] = rope["rope_theta"]
        older["rope_scaling"] = scaling if scaling.get("rope_type", "default") != "default" else None
    return older


def to_older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json` with the older class, and the older name of further special tokens."""
    older = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    if older.get("tokenizer_class") == "TokenizersBackend":
        older["tokenizer_class"] = _TOKENIZER_CLASS
        older.pop("backend", None)
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older


def embed_chat_template(folder: Path) -> None:
    """Write the chat template into `tokenizer_config.json`, too: older readers look only there."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        text = template.read_text(encoding="utf-8")
        _rewrite_json(folder / TOKENIZER_CONFIG_FILE, lambda config: config | {"chat_template": text})


def merge_generation_config(folder: Path, chat_tokens: dict[str, Any]) -> dict[str, Any]:
    """Return the generation settings of a model folder merged with the tokens that end an answer.

    Args:
        folder: model folder, which may have no settings.
        chat_tokens: `eos_token_id` (a list, or None) and `pad_token_id` of the tokenizer.
    """
    settings = read_json_object(folder / GENERATION_CONFIG_FILE) if (folder / GENERATION_CONFIG_FILE).is_file() else {}
    eos = settings.get("eos_token_id")
    saved_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    eos_ids = list(dict.fromkeys([*saved_ids, *(chat_tokens["eos_token_id"] or [])]))
    settings = {
        key: value for key, value in settings.items() if key not in ("_from_model_config", "transformers_version")
    }
    pad_id = settings.get("pad_token_id")
    return settings | {
        "eos_token_id": eos_ids or None,
        "pad_token_id": chat_tokens["pad_token_id"] if pad_id is None else pad_id,
    }
