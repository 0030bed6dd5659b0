"""Download models from Hugging Face or ModelScope into a local cache, only the files that are read.

Sources: huggingface_hub's `snapshot_download`; ModelScope by its HTTP API (`modelscope_api`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.hub import huggingface, modelscope_api, modelscope_models
from anabatic.parallel.collectives import barrier
from anabatic.parallel.world import World

Hub = Literal["huggingface", "modelscope"]
HUBS: tuple[Hub, ...] = ("huggingface", "modelscope")

ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Configuration, tokenizer, weights. Pickled weights (*.bin, *.pt, *.pth) are excluded: loading them runs code."""
IGNORE_PATTERNS = ("*/*", "consolidated*")
"""Folders hold other formats, and `consolidated*.safetensors` duplicate the weights under Mistral's names."""


def resolve_hub(hub: Hub | None = None) -> Hub:
    """Return the hub: the argument, else `ANABATIC_HUB`, else ModelScope with `USE_MODELSCOPE_HUB=1`.

    Raises:
        ConfigError: `ANABATIC_HUB` is not a hub.
    """
    if hub is not None:
        return hub
    value = os.environ.get("ANABATIC_HUB", "")
    if value and value not in HUBS:
        raise ConfigError(f"ANABATIC_HUB is {value!r}", f"use one of {', '.join(HUBS)}")
    use_modelscope = os.environ.get("USE_MODELSCOPE_HUB", "").lower() in ("1", "true")
    return value or ("modelscope" if use_modelscope else "huggingface")


def fetch_model(name: str, hub: Hub | None = None, world: World | None = None) -> Path:
    """Return the local folder of a model, downloaded if needed: configuration, tokenizer and safetensors.

    One rank of each node downloads; the others wait and read the cache.

    Args:
        name: `OWNER/NAME`.
        hub: the hub; None: `resolve_hub` decides.
        world: the ranks that call this together; None: only this process.

    Raises:
        DataError: no such model, no access, no connection, or a broken download.
    """
    fetch = _FETCHERS[resolve_hub(hub)]
    world = world or World()
    should_wait = world.size > 1 and os.environ.get("LOCAL_RANK", "0") != "0"
    if should_wait:
        barrier(world)
    folder = fetch(name, should_wait)
    if not should_wait:
        barrier(world)
    log.debug(f"{name} lies in {folder}")
    return folder


def _fetch_huggingface(name: str, cached: bool) -> Path:
    import huggingface_hub

    offline = huggingface.is_offline()
    if not (cached or offline):
        log.info(f"{name}: from {huggingface.get_endpoint()}")
    with huggingface.translate_errors(name, "model"):
        return Path(
            huggingface_hub.snapshot_download(
                name,
                endpoint=huggingface.get_endpoint(),
                allow_patterns=list(ALLOW_PATTERNS),
                ignore_patterns=list(IGNORE_PATTERNS),
                local_files_only=cached or offline,
            )
        )


def _is_wanted(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in ALLOW_PATTERNS) and not any(
        fnmatch(path, pattern) for pattern in IGNORE_PATTERNS
    )


def _fetch_modelscope(name: str, cached: bool) -> Path:
    return modelscope_models.download_snapshot(name, _is_wanted, cached or modelscope_api.is_offline())


_FETCHERS: dict[Hub, Callable[[str, bool], Path]] = {"huggingface": _fetch_huggingface, "modelscope": _fetch_modelscope}
