"""What an adapter folder says of itself: `adapter_config.json`, ours or PEFT's, and the names in its weights.

Keys: PEFT 0.21, `peft/tuners/lora/config.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

from anabatic.config.tuner import Lora
from anabatic.core import json_text
from anabatic.core.errors import ConfigError, DataError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_A = ".lora_A.weight"
_USAGE = "write FOLDER or FOLDER@WEIGHT, such as runs/lora@0.5"
_MERGE_FIRST = "merge the adapter with PEFT first (merge_and_unload), and give the merged model"

_OTHER = (
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Kinds of adapters that make other numbers than `W + scale B A`; set, they cannot be passed over."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which PEFT changes the base model's weights whenever it loads the adapter."""


def parse(spec: str) -> tuple[str, float]:
    """Read `FOLDER[@WEIGHT]`; a folder that exists as written, `@` included, is taken as written.

    Raises:
        ConfigError: no folder, or a weight that is no number but 0.
    """
    match = re.fullmatch(r"(.+)@([^@/]*)", spec)
    if match is None or Path(spec).expanduser().exists():
        if not spec.strip():
            raise ConfigError("adapter: a name is empty", _USAGE)
        return spec, 1.0
    number = re.fullmatch(r"-?[0-9]*\.?[0-9]+(?:[eE]-?[0-9]+)?", match[2])
    if number is None or float(match[2]) == 0.0:
        raise ConfigError(f'adapter: "{match[2]}" in "{spec}" is no weight', f"{_USAGE}; any number but 0")
    return match[1], float(match[2])


def whole_model(folder: Path) -> ConfigError:
    """Return the error for a model where an adapter is expected."""
    return ConfigError(f"adapter: {folder} is a whole model, no adapter", "give it as --model")


def read_config(folder: Path) -> dict[str, Any]:
    """Return `adapter_config.json`.

    Raises:
        DataError: it is missing, torn, or of another kind of adapter.
    """
    path = folder / CONFIG
    try:
        config = json_text.read(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "copy the folder again") from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise DataError(f"{path} says no peft_type: it is not an adapter's", "copy the folder again")
    if config["peft_type"] != "LORA":
        what = f"{path}: the adapter is {config['peft_type']}, not LORA"
        raise DataError(what, "only LoRA adapters (with DoRA, rsLoRA) are read")
    return config


def lora_of(config: dict[str, Any], folder: Path) -> Lora:
    """Return the settings of a saved adapter.

    Raises:
        DataError: they are damaged, or of an adapter that makes other numbers than ours do.
    """
    path = folder / CONFIG
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise DataError(f"{path}: ranks differ from layer to layer", _MERGE_FIRST)
    other = next((key for key in _OTHER if config.get(key)), None)
    if other is not None:
        raise DataError(f"{path}: {other} is set, which is not done here", _MERGE_FIRST)
    begun = str(config.get("init_lora_weights", True))
    if begun.startswith(_CHANGE_BASE):
        raise DataError(
            f"{path}: init_lora_weights is {begun}: the adapter fits a base model that PEFT changes while it loads",
            f"save it with path_initial_model_for_weight_conversion, or {_MERGE_FIRST}",
        )
    targets = config.get("target_modules") or []
    try:
        return Lora(
            r=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            target_modules=[targets] if isinstance(targets, str) else sorted(targets) or ["all-linear"],
            modules_to_save=list(config.get("modules_to_save") or []),
            use_rslora=bool(config.get("use_rslora")),
            use_dora=bool(config.get("use_dora")),
        )
    except KeyError as error:
        raise DataError(f"{path} lacks {error}", "copy the folder again") from error
    except (TypeError, ValueError, OverflowError, ConfigError) as error:
        raise DataError(f"{path} is damaged: {error}", "copy the folder again") from error


def require_weights(folder: Path) -> None:
    """Make sure that an adapter folder holds tensors.

    Raises:
        DataError: it does not.
    """
    if not (folder / WEIGHTS).is_file():
        raise DataError(f"{folder / WEIGHTS} is missing", "copy the folder again; only safetensors are read")


def adapted(folder: Path) -> list[str]:
    """Return the layers that have an adapter, in the order of their names; read from the head of the weights' file.

    `target_modules` may be a regular expression, and `layers_to_transform` a part of the blocks: the tensors say it.

    Raises:
        DataError: the file is missing or torn, or holds no adapter.
    """
    require_weights(folder)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            names = list(file.keys())
    except Exception as error:  # safetensors raises its own class, straight from Rust
        raise DataError(f"{folder / WEIGHTS} cannot be read: {error}", "copy the folder again") from error
    found = sorted(name.removeprefix(PREFIX).removesuffix(_A) for name in names if name.endswith(_A))
    if not found:
        raise DataError(f"{folder / WEIGHTS} holds no adapter: {len(names)} tensors", "copy the folder again")
    return found
