"""Download models from Hugging Face or ModelScope into a local cache, only the files that are read.

Sources: huggingface_hub's `snapshot_download`; ModelScope's HTTP API as its own client calls it (modelscope/hub/api.py:
`/api/v1/models/ID/repo/files` lists `Path`, `Size`, `Sha256`, `/api/v1/models/ID/repo?FilePath=` is a file).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.models.hub import modelscope_api
from anabatic.parallel.process_groups import World, barrier

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
    from huggingface_hub import constants, errors

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    offline = constants.is_offline_mode()
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    alternatives = (
        "set HF_ENDPOINT to a mirror such as https://hf-mirror.com, take ModelScope with ANABATIC_HUB=modelscope,"
        " or copy the folder here and give its path"
    )
    if not (cached or offline):
        log.info(f"{name}: from {endpoint}")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                endpoint=endpoint,
                allow_patterns=list(ALLOW_PATTERNS),
                ignore_patterns=list(IGNORE_PATTERNS),
                local_files_only=cached or offline,
            )
        )
    except errors.GatedRepoError as error:
        raise DataError(
            f"{name}: {endpoint} gives it only to those who have accepted its terms",
            f"accept them at {endpoint}/{name}, and set HF_TOKEN to a token of that account",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DataError(
            f"{name}: neither a folder here nor a model of {endpoint} (or a private one)",
            "check the spelling; for a private one set HF_TOKEN; ModelScope is ANABATIC_HUB=modelscope",
        ) from error
    except errors.HfHubHTTPError as error:
        message = f"{name}: {endpoint} answers {error.response.status_code}"
        raise DataError(message, f"try again later; or {alternatives}") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if offline else f"{endpoint} cannot be reached"
        offline_hint = "unset HF_HUB_OFFLINE, or give the model's folder" if offline else ""
        raise DataError(
            f"{name}: no such folder, not (wholly) in the cache, and {reason}", offline_hint or alternatives
        ) from error
    except Exception as error:  # the HTTP library depends on the version of huggingface_hub
        if isinstance(error, errors.HFValidationError) or not _is_transfer(error):
            raise
        message = f"{name}: the download from {endpoint} broke off: {_first_line(error)}"
        raise DataError(message, f"start again, what is here is kept; or {alternatives}") from error


def _is_transfer(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_wanted(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in ALLOW_PATTERNS) and not any(
        fnmatch(path, pattern) for pattern in IGNORE_PATTERNS
    )


def _fetch_modelscope(name: str, cached: bool) -> Path:
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "on", "yes")
    return modelscope_api.download_snapshot(name, _is_wanted, cached or offline)


_FETCHERS: dict[Hub, Callable[[str, bool], Path]] = {"huggingface": _fetch_huggingface, "modelscope": _fetch_modelscope}
