"""Checkpoints: list them, verify that they are complete, save and load them.

A checkpoint is a folder `checkpoint-<step>`: the sharded tensors (torch.distributed.checkpoint), the random numbers of
each rank (`rng-<rank>.safetensors`), `state.json` (host numbers, loader position), `config.yaml`, and `manifest.json`
with the size and checksum of every file, written last. Each rank checksums its own files while it writes them, and
rank 0 seals the list. It is built under another name and renamed; a folder without a
valid manifest does not exist.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import torch as safetensors_torch
from torch import Tensor

from anabatic.core import cpu_info, json_reader, log
from anabatic.core.errors import AnabaticError, CheckpointError
from anabatic.core.formatting import format_size
from anabatic.core.paths import RunFolder, find_os_error, make_write_error
from anabatic.device.device import Device
from anabatic.parallel.collectives import all_gather_text, barrier, broadcast_text, gather_text
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.world import World
from anabatic.train.checkpoint import manifest
from anabatic.train.checkpoint.memory_copies import MemoryCopy
from anabatic.train.checkpoint.run_state import RunState


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint whose files are whole.

    Attributes:
        memory: it is no folder of the disk, but a copy in the machines' memory.
    """

    path: Path
    step: int
    state: RunState
    memory: MemoryCopy | None = None


@dataclass(frozen=True)
class CheckpointContent:
    """What a checkpoint holds.

    Attributes:
        tensors: name -> tensor, the same names on every rank of a stage.
        rng_state: states of this rank's random numbers.
        host_json: JSON text of host numbers, the same on every rank.
        manifest_fields: keys of the manifest: how it was written.
        stages: of a pipeline; each has its own layers.
    """

    tensors: Mapping[str, Tensor]
    rng_state: Mapping[str, Tensor]
    host_json: str
    manifest_fields: dict[str, Any] = field(default_factory=dict)
    stages: int = 1


def save_checkpoint(folder: RunFolder, step: int, content: CheckpointContent, group: RankGroup) -> Path:
    """Write `checkpoint-<step>`; every rank of `group`, all of the job's, calls this.

    Raises:
        CheckpointError: the tensors cannot be written.
        Failure: the disk filled up or refuses writes; older checkpoints are untouched.
    """
    dcp = cpu_info.import_checkpoints()
    from anabatic.train.checkpoint import dcp_writer  # imports sharded tensors

    target = folder.checkpoint_path(step)
    built = manifest.temporary_path(target)
    first = group.rank == 0
    try:
        if first:
            shutil.rmtree(built, ignore_errors=True)
            built.mkdir(parents=True)
        barrier(group)
        alone: dict[str, Any] = {"no_dist": True} if group.size == 1 else {"process_group": group.process_group}
        writer = dcp_writer.ChecksumStorageWriter(built)
        planner = dcp_writer.LinearSavePlanner(group, content.stages)
        try:
            dcp.save(dict(content.tensors), storage_writer=writer, planner=planner, **alone)
        finally:
            writer.pause.stop()
        rng = safetensors_torch.save(dict(content.rng_state))
        manifest.write_file(built / f"rng-{group.rank}.safetensors", rng, writer.written)
        # A rank that has died has sent no list: nothing is sealed, and there is no checkpoint.
        lists = gather_text(json.dumps(writer.written), group)
        if first:
            written = {name: entry for text in lists for name, entry in json_reader.loads(text).items()}
            manifest.commit_checkpoint(
                built, target, step, content.host_json, folder.config, content.manifest_fields, written
            )
    except dcp.api.CheckpointException as error:
        raise _unwrap_error(error, target) from error
    except Exception as error:
        cause = find_os_error(error)
        if cause is None:
            raise
        raise make_write_error(target, cause) from error
    finally:
        if first:
            shutil.rmtree(built, ignore_errors=True)
    barrier(group)
    return target


def require_space(folder: RunFolder, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Make sure that the disk has room before anything is written.

    Raises:
        CheckpointError: it has not.
    """
    free = shutil.disk_usage(folder.root).free
    needed = 1.05 * sum(tensor.nbytes for tensor in tensors.values())
    if free < needed:
        raise CheckpointError(
            f"{folder.checkpoint_path(step)} needs {format_size(needed)}, but {format_size(free)} are free",
            "free some space or lower save.keep_last; older checkpoints are untouched and the job continues from them",
        )


def _unwrap_error(error: Any, target: Path) -> Exception:
    """Return the message of the first rank that failed: DCP wraps what it met."""
    for wrapped in error.failures.values():
        cause = find_os_error(wrapped[0])
        if cause is not None:
            return make_write_error(target, cause)
    first = next(iter(error.failures.values()))[0] if error.failures else error
    if "inline_container" in str(first):  # torch's zip writer hides the reason, a limit on file sizes, say
        first = "the system refused a part of a file (a limit on file sizes, or a full disk?)"
    return CheckpointError(f"{target} cannot be written: {first}", "older checkpoints are untouched")


def find_newest_checkpoint(folder: RunFolder, world: World, before: int | None = None) -> CheckpointInfo | None:
    """Return the newest whole checkpoint; each broken one that is skipped is logged. Every rank calls this.

    The ranks share the reading: each compares the checksums of some files.

    Args:
        before: only checkpoints of earlier steps.
    """
    steps = [step for step, _ in manifest.list_checkpoint_folders(folder.root) if before is None or step < before]
    if world.size > 1:
        steps = list(map(int, broadcast_text(" ".join(map(str, steps)), world).split()))
    for step in sorted(steps, reverse=True):
        path = folder.checkpoint_path(step)
        problems = all_gather_text(manifest.find_first_fault(path, world.rank, world.size), world)
        if not any(problems):
            manifest.log_seal(path)
            return CheckpointInfo(path, step, RunState.from_json(manifest.read_host_state(path), path))
        log.warn(f"{path} is not used: {next(filter(None, problems))}")
    return None


def ignore_dcp_warnings() -> None:
    """torch warns of every checkpoint that one process alone writes or reads. Not for a thread: filters are global."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is (disabled|unavailable)")


def load_checkpoint(found: CheckpointInfo, tensors: Mapping[str, Tensor], device: Device, world: World) -> None:
    """Fill `tensors` in place, whatever the world size that saved them; restore this rank's random numbers.

    Raises:
        CheckpointError: names or shapes differ from what was saved.
    """
    if found.memory is not None:
        found.memory.load(tensors, device)
        return
    read_tensors(found.path, tensors, world)
    # Neighbours that work on the same data draw the same numbers; ranks that are new continue as the first one.
    drawn = (found.path / f"rng-{rank}.safetensors" for rank in (world.rank - world.tensor_group.rank, 0))
    own = next((file for file in drawn if file.is_file()), None)
    if own is not None:
        device.set_rng_state(_read_rng_state(own))


def _read_rng_state(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors_torch.load_file(file)
    except Exception as error:  # safetensors raises its own class, straight from Rust
        raise CheckpointError(f"{file} cannot be read: {_first_line(error)}", manifest.USE_ANOTHER) from error


def read_tensors(path: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Fill `tensors`, all of a whole checkpoint's or some, in place.

    Raises:
        CheckpointError: names or shapes differ from what was saved, or the folder holds something else than data.
    """
    dcp = cpu_info.import_checkpoints()
    from anabatic.train.checkpoint import dcp_reader, dcp_writer  # import sharded tensors

    ignore_dcp_warnings()
    with dcp_writer.FullCollectionPause():
        reader = dcp_reader.DataReader(path)
        try:
            dcp.load(dict(tensors), storage_reader=reader, no_dist=world.size == 1)
        except (dcp.api.CheckpointException, RuntimeError, ValueError) as error:
            raise _explain_read_error(error, path) from error


def _explain_read_error(error: Any, path: Path) -> Exception:
    """Return our error for one of DCP, which wraps what its ranks met."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    if isinstance(cause, AnabaticError):
        return cause
    if isinstance(cause, pickle.UnpicklingError):  # of torch.load with weights_only
        return CheckpointError(
            f"{path} holds a file of tensors with something else in it: {_first_line(cause)}",
            manifest.USE_ANOTHER,
        )
    return CheckpointError(
        f"{path} does not fit this model or optimizer: {_first_line(cause)}",
        "continue with the settings that saved it, or start over with --save.resume never",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
