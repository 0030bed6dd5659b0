"""What a run needs beside its devices: the host's memory, the disk, energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabatic.device.table import PROCESSOR_NAME, Chip
from anabatic.plan.memory_estimate import get_gradient_bytes, get_persistent_bytes
from anabatic.plan.training_setup import TrainingSetup

PROCESS_BYTES = 0.5 * 2**30
"""Bytes of a process with torch, transformers and our program, before it has a model: the resident set of
`anabatic sft` on a CPU (docs/dev); drivers take more, which was not measured."""
DISK_BYTES_PER_SECOND = 1e9
"""Bytes a second that a checkpoint is written at: an assumption; local disks may be faster, networks slower."""
MAX_GATHERED_BYTES = 4.0 * 2**30
"""Bytes of weights that the rank which writes a model gathers in the host's memory for a file
(`models/weights_reader.py`)."""
_MAX_TWO_BYTE_VOCAB = 1 << 16
"""Vocabularies up to here are stored in two bytes an id, larger ones in four (`data/shards/dataset_cache.py`)."""


@dataclass(frozen=True)
class HostResources:
    """Bytes, and kilowatt-hours.

    Attributes:
        host_bytes: of each machine's memory, by part.
        checkpoint_bytes, model_bytes: one checkpoint; one saved model or adapter.
        disk_bytes: by part; the tokenised data only where their size is known.
        kwh: of the devices at the maker's largest power for the whole run; None: no power is published, or the run's
            length is not known.
    """

    host_bytes: dict[str, float]
    checkpoint_bytes: float
    model_bytes: float
    disk_bytes: dict[str, float]
    kwh: float | None


def estimate_host_resources(
    setup: TrainingSetup, job: Any, chip: Chip, npus: int, seconds: float, tokens: int | None
) -> HostResources:
    """Return what a job needs.

    Args:
        npus: devices of a machine.
        seconds: of the run; 0: not known.
        tokens: of one pass over the data; None: not known.
    """
    share = npus / setup.world_size
    checkpoint = setup.tensor * sum(get_persistent_bytes(setup)[name] for name in ("trained weights", "optimizer"))
    kept = ("trained weights",) if setup.tuner == "lora" else ("trained weights", "frozen weights")
    model = setup.tensor * sum(
        get_persistent_bytes(setup)[name] for name in kept
    )  # as they are trained, not in half the bytes
    host = {"programs": npus * PROCESS_BYTES}
    if chip.name != PROCESSOR_NAME:
        host["a file of the saved model"] = min(model, MAX_GATHERED_BYTES)
    if setup.offload:
        host["offloaded weights and optimizer"] = share * setup.tensor * sum(get_persistent_bytes(setup).values())
        host["offloaded gradients"] = share * setup.tensor * get_gradient_bytes(setup) * setup.trained_params
    if job.save.background != "off":
        host["a copy of the checkpoint"] = share * checkpoint
    copies = job.save.keep_last + job.save.keep_best + 1  # a new one is whole before an old one goes
    disk = {f"checkpoints, {copies} at most": copies * checkpoint, "best and final model": 2 * model}
    if tokens is not None:
        chats = 0 if not hasattr(job, "tuner") else 1  # which tokens are targets
        disk["tokenised data"] = tokens * (chats + (2.0 if setup.shape.vocab <= _MAX_TWO_BYTE_VOCAB else 4.0))
    kwh = chip.watts * setup.world_size * seconds / 3.6e6 if chip.watts and seconds else None
    return HostResources(host, checkpoint, model, disk, kwh)
