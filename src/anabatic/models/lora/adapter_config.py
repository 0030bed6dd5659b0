"""Read the configuration of an adapter folder: `adapter_config.json`, ours or PEFT's, and the names of its weights.

Keys: PEFT 0.21, `peft/tuners/lora/config.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

from anabatic.config.sections.train_jobs import Lora
from anabatic.core import json_reader, paths
from anabatic.core.errors import ConfigError, DataError
from anabatic.plan.layer_names import is_expert_target

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_LORA_A_SUFFIX = ".lora_A.weight"
_USAGE = "write FOLDER or FOLDER@WEIGHT, such as runs/lora@0.5"
_MERGE_FIRST_HINT = "merge the adapter with PEFT first (merge_and_unload), and give the merged model"

_UNSUPPORTED_KEYS = (
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "trainable_token_indices",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Keys of adapters that compute something else than `W + scale B A`; they must not be ignored when set."""
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` with which PEFT changes the base model's weights on every load of the adapter."""


def parse_adapter_spec(spec: str) -> tuple[str, float]:
    """Parse `FOLDER[@WEIGHT]`; an existing folder with `@` in its name is used as it is.

    Raises:
        ConfigError: there is no folder, or the weight is 0 or not a number.
    """
    match = re.fullmatch(r"(.+)@([^@/]*)", spec)
    if match is None or Path(spec).expanduser().exists():
        if not spec.strip():
            raise ConfigError("adapter: a name is empty", _USAGE)
        return spec, 1.0
    weight_match = re.fullmatch(r"-?[0-9]*\.?[0-9]+(?:[eE]-?[0-9]+)?", match[2])
    if weight_match is None or float(match[2]) == 0.0:
        raise ConfigError(f'adapter: "{match[2]}" in "{spec}" is no weight', f"{_USAGE}; any number but 0")
    return match[1], float(match[2])


def whole_model_error(folder: Path) -> ConfigError:
    """Return the error for a model where an adapter is expected."""
    return ConfigError(f"adapter: {folder} is a whole model, no adapter", "give it as --model")


def missing_adapter_error(name: str) -> DataError:
    """Return the error for an adapter that is not there."""
    message = f"adapter: the folder {os.path.expanduser(name)} does not exist.{paths.suggest_folder(name)}"
    return DataError(message.removesuffix("."), "give the folder of a saved adapter, or of its run")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return `adapter_config.json`.

    Raises:
        DataError: it is missing, damaged, or of another type of adapter.
    """
    path = folder / ADAPTER_CONFIG_FILE
    try:
        config = json_reader.read_json_file(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "copy the folder again") from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise DataError(f"{path} says no peft_type: it is not an adapter's", "copy the folder again")
    if config["peft_type"] != "LORA":
        message = f"{path}: the adapter is {config['peft_type']}, not LORA"
        raise DataError(message, "only LoRA adapters (with DoRA, rsLoRA) are read")
    return config


def parse_lora_settings(config: dict[str, Any], folder: Path) -> Lora:
    """Return the settings of a saved adapter.

    Raises:
        DataError: they are damaged, or of an unsupported adapter.
    """
    path = folder / ADAPTER_CONFIG_FILE
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise DataError(f"{path}: ranks differ from layer to layer", _MERGE_FIRST_HINT)
    unsupported = next((key for key in _UNSUPPORTED_KEYS if config.get(key)), None)
    if unsupported is not None:
        raise DataError(f"{path}: {unsupported} is set, which is not done here", _MERGE_FIRST_HINT)
    init_method = str(config.get("init_lora_weights", True))
    if init_method.startswith(_BASE_CHANGING_INITS):
        raise DataError(
            f"{path}: init_lora_weights is {init_method}: the adapter fits a base model that PEFT changes while it"
            " loads",
            f"save it with path_initial_model_for_weight_conversion, or {_MERGE_FIRST_HINT}",
        )
    targets = config.get("target_modules") or []
    experts = config.get("target_parameters") or []
    if not isinstance(experts, list) or not all(is_expert_target(str(name)) for name in experts):
        raise DataError(
            f"{path}: target_parameters is {experts}; only stacked weights of experts are known", _MERGE_FIRST_HINT
        )
    try:
        linear = [targets] if isinstance(targets, str) else sorted(targets)
        return Lora(
            r=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            target_modules=[*linear, *sorted(experts)] or ["all-linear"],
            modules_to_save=list(config.get("modules_to_save") or []),
            use_rslora=bool(config.get("use_rslora")),
            use_dora=bool(config.get("use_dora")),
        )
    except KeyError as error:
        raise DataError(f"{path} lacks {error}", "copy the folder again") from error
    except (TypeError, ValueError, OverflowError, ConfigError) as error:
        raise DataError(f"{path} is damaged: {error}", "copy the folder again") from error


def require_adapter_weights(folder: Path) -> None:
    """Check that an adapter folder has weights.

    Raises:
        DataError: it has none.
    """
    if not (folder / ADAPTER_WEIGHTS_FILE).is_file():
        raise DataError(
            f"{folder / ADAPTER_WEIGHTS_FILE} is missing", "copy the folder again; only safetensors are read"
        )


def list_adapted_layers(folder: Path) -> list[str]:
    """Return the layers with an adapter, sorted by name, from the header of the weight file.

    The tensor names are exact: `target_modules` may be a regular expression, `layers_to_transform` limits the blocks.

    Raises:
        DataError: the file is missing or damaged, or has no adapter.
    """
    require_adapter_weights(folder)
    try:
        with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as file:
            names = list(file.keys())
    except Exception as error:  # safetensors raises its own class, straight from Rust
        raise DataError(f"{folder / ADAPTER_WEIGHTS_FILE} cannot be read: {error}", "copy the folder again") from error
    layers = sorted(
        name.removeprefix(PEFT_PREFIX).removesuffix(_LORA_A_SUFFIX) for name in names if name.endswith(_LORA_A_SUFFIX)
    )
    if not layers:
        raise DataError(
            f"{folder / ADAPTER_WEIGHTS_FILE} holds no adapter: {len(names)} tensors", "copy the folder again"
        )
    return layers
