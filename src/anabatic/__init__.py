"""anabatic: train language models on Ascend NPUs, NVIDIA GPUs and CPUs with one tool.

`anabatic.sft(model=..., data=...)` and the other commands are functions here, made when they are first used;
`anabatic.run_command("rl", ...)` runs any of them.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return a function of `anabatic.api`: importing this package imports nothing else."""
    if name.startswith("_"):
        raise AttributeError(name)
    # By name: every room imports this package, and none below may import `api`.
    functions = importlib.import_module("anabatic.api.job_functions")
    found = functions.find_function(name)
    if found is None:
        raise AttributeError(f"module 'anabatic' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    functions = importlib.import_module("anabatic.api.job_functions")
    return sorted(["__version__", *functions.list_names()])
