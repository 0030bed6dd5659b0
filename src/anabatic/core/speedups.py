"""The door to `anabatic.cpu_speed`: nothing else imports that folder, and everything runs where it is deleted."""

from __future__ import annotations

import functools
import importlib
from typing import Any

_FOLDER = "anabatic.cpu_speed"


@functools.cache
def find_speedup(module: str, name: str) -> Any:
    """Return an attribute of a module of `anabatic.cpu_speed`; None where the folder is not there."""
    try:
        importlib.import_module(_FOLDER)
    except ModuleNotFoundError:
        return None
    return getattr(importlib.import_module(f"{_FOLDER}.{module}"), name)


def install_quick_imports() -> None:
    """Make the first import of transformers' models a quick one, where the folder is there."""
    install = find_speedup("quick_imports", "install_quick_imports")
    if install is not None:
        install()


def import_checkpoints() -> Any:
    """Import and return `torch.distributed.checkpoint`."""
    load = find_speedup("quick_imports", "import_checkpoints")
    return importlib.import_module("torch.distributed.checkpoint") if load is None else load()
