"""Packages that `pip install anabatic` does not bring: import one, or name the extra that has it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from anabatic.core.errors import ConfigError

OPTIONAL_PACKAGES = {
    "fastapi": ("fastapi", "serve"),
    "uvicorn": ("uvicorn", "serve"),
    "httptools": ("httptools", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "tensorboard": ("tensorboard", "track"),
    "swanlab": ("swanlab", "track"),
    "wandb": ("wandb", "track"),
    "pynvml": ("nvidia-ml-py", "monitor"),
    "llguidance": ("llguidance", "constrain"),
    "ray": ("ray", "ray"),
    "modelscope_hub": ("modelscope-hub", "modelscope"),
    "py3langid": ("py3langid", "data"),
    "langdetect": ("langdetect", ""),
    "PIL": ("pillow", "vision"),
    "av": ("av", ""),
}
"""Module as imported -> (distribution as installed, extra of this package that has it; empty: none). Packages of
commands add theirs when they are imported."""

_TOOL_INSTALLERS = {
    "uv-receipt.toml": "uv tool install --force",
    "pipx_metadata.json": "pipx install --force",
}
"""File in an environment that a tool made for this program alone -> the command that adds packages to it."""


def import_optional(module: str, purpose: str, alternative: str = "") -> Any:
    """Import and return an optional module.

    Args:
        module: dotted name; its first part is a key of `OPTIONAL_PACKAGES`.
        purpose: what needs it; the subject of the message.
        alternative: what to do instead of installing it; ends the hint.

    Raises:
        ConfigError: it is not installed, or it cannot be imported.
    """
    top = module.partition(".")[0]
    distribution, _ = OPTIONAL_PACKAGES[top]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != top:
            raise _make_broken_error(distribution, purpose, error) from error
        hint = format_install_command(top) + (f", {alternative}" if alternative else "")
        raise ConfigError(f"{purpose} needs {distribution}, which is not installed", hint) from error
    except ImportError as error:
        raise _make_broken_error(distribution, purpose, error) from error


def require_installed(module: str, purpose: str) -> None:
    """Make sure, without importing it, that an optional module is installed.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec(module) is None:
        message = f"{purpose} needs {OPTIONAL_PACKAGES[module][0]}, which is not installed"
        raise ConfigError(message, format_install_command(module))


def format_install_command(top: str) -> str:
    """Return the command that installs the extra of a module: for pip, or for the tool that made this environment."""
    distribution, extra = OPTIONAL_PACKAGES[top]
    if not extra:
        return f"pip install {distribution}"
    command = next((line for file, line in _TOOL_INSTALLERS.items() if Path(sys.prefix, file).is_file()), "pip install")
    return f"{command} 'anabatic[{extra}]'"


def _make_broken_error(distribution: str, purpose: str, error: ImportError) -> ConfigError:
    message = f"{purpose} needs {distribution}, which cannot be imported: {' '.join(str(error).split())[:300]}"
    return ConfigError(message, f"pip install --force-reinstall {distribution}")
