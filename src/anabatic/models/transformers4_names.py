"""What older readers ask of a model folder that transformers 5 has written.

transformers 5 renamed keys of its files. Programs built on transformers 4 (serving engines stay on it for long) do not
know the new names: they fall back to a default rotary base, which makes a wrong model of it without a word, or fail at
the tokenizer's class. Both names are written; transformers 5 reads either (`configuration_utils.py`,
`modeling_rope_utils.py` and `tokenization_utils_base.py` of 5.23).
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
"""The name that both versions know of a tokenizer that `tokenizer.json` describes wholly."""
_LOCAL_KEYS = ("is_local", "local_files_only")
"""How the tokenizer was read here: nothing of the model's."""


def write_older_names(folder: Path) -> None:
    """Write the older names into the files of a folder, and give all of them the same permissions."""
    _rewrite_json(folder / CONFIG_FILE, to_older_config)
    _rewrite_json(folder / TOKENIZER_CONFIG_FILE, to_older_tokenizer)
    mode = (folder / CONFIG_FILE).stat().st_mode & 0o777
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)  # safetensors writes files that nobody else may read


def _rewrite_json(path: Path, change: Any) -> None:
    path.write_text(json.dumps(change(read_json_object(path)), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def to_older_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config.json` with `torch_dtype`, `rope_theta` and `rope_scaling` beside their newer names."""
    known = dict(config)
    if "dtype" in known:
        known["torch_dtype"] = known["dtype"]
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values()):
        rest = {key: value for key, value in rope.items() if key != "rope_theta"}
        if "rope_theta" in rope:
            known["rope_theta"] = rope["rope_theta"]
        known["rope_scaling"] = rest if rest.get("rope_type", "default") != "default" else None
    return known


def to_older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json` with the older class, and the older name of further special tokens."""
    known = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    if known.get("tokenizer_class") == "TokenizersBackend":
        known["tokenizer_class"] = _TOKENIZER_CLASS
        known.pop("backend", None)
    if isinstance(known.get("extra_special_tokens"), list):
        known["additional_special_tokens"] = known.pop("extra_special_tokens")
    return known


def embed_chat_template(folder: Path) -> None:
    """Write the chat template into `tokenizer_config.json` too: older readers look for it there alone."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        text = template.read_text(encoding="utf-8")
        _rewrite_json(folder / TOKENIZER_CONFIG_FILE, lambda config: config | {"chat_template": text})


def merge_generation_config(folder: Path, ends: dict[str, Any]) -> dict[str, Any]:
    """Return the generation settings of a model folder together with the tokens that end an answer.

    Args:
        folder: may have no settings.
        ends: `eos_token_id` (a list, or None) and `pad_token_id`, as the tokenizer says.
    """
    known = read_json_object(folder / GENERATION_CONFIG_FILE) if (folder / GENERATION_CONFIG_FILE).is_file() else {}
    said = known.get("eos_token_id")
    first = said if isinstance(said, list) else [] if said is None else [said]
    every = list(dict.fromkeys([*first, *(ends["eos_token_id"] or [])]))
    known = {key: value for key, value in known.items() if key not in ("_from_model_config", "transformers_version")}
    pad = known.get("pad_token_id")
    return known | {"eos_token_id": every or None, "pad_token_id": ends["pad_token_id"] if pad is None else pad}
