"""The file of `accelerate config` as options of `accelerate launch`, whose names its keys have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEYS = ("compute_environment", "distributed_type", "main_training_function", "machine_rank")
"""By which a file is known as accelerate's."""
_MIN_KEYS = 2
_BLOCKS = {
    "deepspeed_config": "",
    "fsdp_config": "",
    "megatron_lm_config": "",
    "parallelism_config": "",
    "dynamo_config": "",
    "mpirun_config": "",
    "fp8_config": "fp8_",
}
"""Block of the file -> what its keys begin with as options."""
_OPEN_VALUES: tuple[Any, ...] = (None, "auto", "", [], {})
"""Values that leave a setting to the program that is started."""


def is_config(tree: Mapping[str, Any]) -> bool:
    """Return whether these are settings of accelerate."""
    return sum(key in KEYS for key in tree) >= _MIN_KEYS


def flatten_config(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as options; those of a block come last, since they say more."""
    plain = {key: value for key, value in tree.items() if not (key in _BLOCKS and isinstance(value, dict))}
    for block, prefix in _BLOCKS.items():
        inner = tree.get(block)
        for key, value in inner.items() if isinstance(inner, dict) else ():
            plain[key if key.startswith(prefix) else prefix + key] = value
    return {key: value for key, value in plain.items() if value not in _OPEN_VALUES}


def find_file(name: str, folder: Path) -> Path | None:
    """Return where a file lies that a command names: beside the script, or in the folder of the shell."""
    return next((path for path in (folder / name, Path(name)) if path.is_file()), None)
