"""Checkpoints: to continue a job exactly where it stood.

A checkpoint is a folder `checkpoint-<step>`: the sharded tensors (torch.distributed.checkpoint), the random numbers of
each rank (`rng-<rank>.safetensors`), `state.json` (host numbers, loader position), `config.yaml`, and `manifest.json`
with the size and checksum of every file, written last. It is built under another name and renamed; a folder without a
valid manifest does not exist.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from anabatic.core import log
from anabatic.core.errors import CheckpointError
from anabatic.core.paths import RunFolder, cannot_write, fsync_folder, os_error, replace_folder
from anabatic.core.text import size
from anabatic.device.device import Device
from anabatic.parallel.world import World, barrier

_NAME = re.compile(r"checkpoint-(\d+)$")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files are whole."""

    path: Path
    step: int
    host: dict[str, Any]


def save(
    folder: RunFolder, step: int, tensors: Mapping[str, Tensor], host: dict[str, Any], device: Device, world: World
) -> Path:
    """Write `checkpoint-<step>`; every rank calls this.

    Args:
        tensors: name -> tensor, the same names on every rank.
        host: JSON-serialisable numbers, the same on every rank.

    Raises:
        CheckpointError: too little space; nothing was written.
        Failure: the disk filled up or refuses writes; older checkpoints are untouched.
    """
    target = folder.checkpoint(step)
    temporary = target.with_name(f".{target.name}.tmp")
    _require_space(folder.root, 1.05 * sum(tensor.nbytes for tensor in tensors.values()), target)
    try:
        if world.first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier(world)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            dcp.save(dict(tensors), checkpoint_id=str(temporary), no_dist=world.size == 1)
        save_file(device.rng_state(), temporary / f"rng-{world.rank}.safetensors")
        barrier(world)
        if world.first:
            _seal(temporary, target, step, host, folder)
    except dcp.api.CheckpointException as error:
        raise _unwrap(error, target) from error
    except Exception as error:
        cause = os_error(error)
        if cause is None:
            raise
        raise cannot_write(target, cause) from error
    finally:
        if world.first:
            shutil.rmtree(temporary, ignore_errors=True)
    barrier(world)
    return target


def _require_space(root: Path, needed: float, target: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(
            f"{target} needs {size(needed)}, but {size(free)} are free",
            "free some space or lower save.keep_last; older checkpoints are untouched and the job continues from them",
        )


def _unwrap(error: Any, target: Path) -> Exception:
    """Return the message of the first rank that failed: DCP wraps what it met."""
    for wrapped in error.failures.values():
        cause = os_error(wrapped[0])
        if cause is not None:
            return cannot_write(target, cause)
    first = next(iter(error.failures.values()))[0] if error.failures else error
    if "inline_container" in str(first):  # torch's zip writer hides the reason, a limit on file sizes, say
        first = "the system refused a part of a file (a limit on file sizes, or a full disk?)"
    return CheckpointError(f"{target} cannot be written: {first}", "older checkpoints are untouched")


def _seal(temporary: Path, target: Path, step: int, host: dict[str, Any], folder: RunFolder) -> None:
    (temporary / "state.json").write_text(json.dumps(host))
    if folder.config.is_file():
        shutil.copy(folder.config, temporary / "config.yaml")
    files = {}
    for path in sorted(temporary.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    manifest = temporary / "manifest.json"
    with open(manifest, "w", encoding="utf-8") as file:
        json.dump({"step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(temporary)
    replace_folder(temporary, target)


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def fault(path: Path) -> str:
    """Return what is wrong with a checkpoint folder, or an empty string."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        files = manifest["files"]
        for name, entry in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} of {entry['bytes']} bytes"
            if _crc32(file) != entry["crc32"]:
                return f"{name} does not match its checksum"
        if "state.json" not in files:
            return "state.json is not in the manifest"
    except OSError as error:
        return f"manifest.json cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is torn"
    return ""


def numbered(root: Path) -> list[tuple[int, Path]]:
    """The checkpoint folders of a run, oldest first, whole or not."""
    found = [(int(match[1]), path) for path in root.glob("checkpoint-*") if (match := _NAME.search(path.name))]
    return sorted(found)


def newest(folder: RunFolder) -> Found | None:
    """Return the newest whole checkpoint; each broken one passed over is named aloud."""
    for step, path in reversed(numbered(folder.root)):
        problem = fault(path)
        if problem:
            log.warn(f"{path} is not used: {problem}")
            continue
        return Found(path, step, json.loads((path / "state.json").read_text(encoding="utf-8")))
    return None


def load(found: Found, tensors: Mapping[str, Tensor], device: Device, world: World) -> None:
    """Fill `tensors` in place, whatever the world size that saved them; restore this rank's random numbers.

    Raises:
        CheckpointError: names or shapes differ from what was saved.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable).*")
            dcp.load(dict(tensors), checkpoint_id=str(found.path), no_dist=world.size == 1)
    except (dcp.api.CheckpointException, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{found.path} does not fit this model or optimizer: {str(error).splitlines()[0]}",
            "continue with the settings that saved it, or start over with --save.resume never",
        ) from error
    # Neighbours that work on the same data draw the same numbers; ranks that are new go on as the first one.
    drawn = (found.path / f"rng-{rank}.safetensors" for rank in (world.rank - world.tensor.rank, 0))
    own = next((file for file in drawn if file.is_file()), None)
    if own is not None:
        device.set_rng_state(load_file(own))


def prune(folder: RunFolder, keep: int, step: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, the one just saved.

    Later ones, which were passed over as broken, must not count: they would push out the good one.
    """
    for _, path in [entry for entry in numbered(folder.root) if entry[0] <= step][:-keep]:
        shutil.rmtree(path, ignore_errors=True)
