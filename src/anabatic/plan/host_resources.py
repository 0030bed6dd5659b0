"""Resources of a run besides its devices: host memory, disk space and energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabatic.device.table import PROCESSOR_NAME, Chip
from anabatic.plan.memory_estimate import get_gradient_bytes, get_persistent_bytes
from anabatic.plan.training_setup import TrainingSetup

PROCESS_BYTES = 0.5 * 2**30
"""Bytes of a process with torch, transformers and this program, before it loads a model: the resident set of
`anabatic sft` on a CPU (docs/dev); drivers take more, which was not measured."""
DISK_BYTES_PER_SECOND = 1e9
"""Assumed bytes per second at which a machine writes a checkpoint; local disks may be faster, networks slower."""
MAX_GATHERED_BYTES = 4.0 * 2**30
"""Maximum bytes of weights that the writing rank gathers in host memory for one file
(`models/weights_reader.py`)."""
_MAX_TWO_BYTE_VOCAB = 1 << 16
"""Largest vocabulary stored in two bytes per id; larger ones use four (`data/shards/dataset_cache.py`)."""


def count_writing_machines(setup: TrainingSetup, machines: int) -> int:
    """Return the machines that write a checkpoint: all of them their shards, or one what every rank holds whole."""
    return machines if setup.is_sharded else 1


@dataclass(frozen=True)
class HostResources:
    """Host memory, disk space and energy of a run.

    Attributes:
        host_bytes: host memory of each machine, by part.
        checkpoint_bytes, model_bytes: size of one checkpoint; of one saved model or adapter.
        disk_bytes: disk space by part; tokenised data only if their size is known.
        kwh: energy of the devices at their published maximum power for the whole run; None: no power is published, or
            the length of the run is unknown.
    """

    host_bytes: dict[str, float]
    checkpoint_bytes: float
    model_bytes: float
    disk_bytes: dict[str, float]
    kwh: float | None


def estimate_host_resources(
    setup: TrainingSetup, job: Any, chip: Chip, npus: int, seconds: float, tokens: int | None
) -> HostResources:
    """Estimate the resources of a job.

    Args:
        npus: devices per machine.
        seconds: length of the run; 0: unknown.
        tokens: tokens of one epoch; None: unknown.
    """
    machine_fraction = npus / setup.world_size
    saved = get_persistent_bytes(setup.whole_experts)
    checkpoint_bytes = setup.tensor * sum(saved[name] for name in ("trained weights", "optimizer"))
    saved_parts = ("trained weights",) if setup.tuner == "lora" else ("trained weights", "frozen weights")
    model_bytes = setup.tensor * sum(
        saved[name] for name in saved_parts
    )  # in the precision of training, not in half the bytes
    host_bytes = {"programs": npus * PROCESS_BYTES}
    if chip.name != PROCESSOR_NAME:
        host_bytes["a file of the saved model"] = min(model_bytes, MAX_GATHERED_BYTES)
    if setup.offload:
        host_bytes["offloaded weights and optimizer"] = (
            machine_fraction * setup.tensor * sum(get_persistent_bytes(setup).values())
        )
        host_bytes["offloaded gradients"] = (
            machine_fraction * setup.tensor * get_gradient_bytes(setup) * setup.trained_params
        )
    if job.save.background != "off":
        host_bytes["a copy of the checkpoint"] = machine_fraction * checkpoint_bytes
    if job.save.memory_every:
        host_bytes["copies in memory, while one is made"] = _estimate_memory_copies(setup, npus, checkpoint_bytes)
    copies = job.save.keep_last + job.save.keep_best + 1  # a new one is complete before an old one is removed
    disk_bytes = {f"checkpoints, {copies} at most": copies * checkpoint_bytes, "best and final model": 2 * model_bytes}
    if tokens is not None:
        mask_bytes = 0 if not hasattr(job, "tuner") else 1  # which tokens are targets
        disk_bytes["tokenised data"] = tokens * (
            mask_bytes + (2.0 if setup.shape.vocab <= _MAX_TWO_BYTE_VOCAB else 4.0)
        )
    kwh = chip.watts * setup.world_size * seconds / 3.6e6 if chip.watts and seconds else None
    return HostResources(host_bytes, checkpoint_bytes, model_bytes, disk_bytes, kwh)


def _estimate_memory_copies(setup: TrainingSetup, npus: int, checkpoint_bytes: float) -> float:
    """Return the bytes of a machine's copies in memory while one is made (`train/checkpoint/memory_copies.py`).

    Shards are kept for this machine and its neighbour; what every rank holds whole is kept once and not sent.
    """
    parts = setup.shard_ranks * setup.tensor if setup.is_sharded else setup.tensor
    machines = 1 if parts == 1 or npus >= setup.world_size else 2
    kept = checkpoint_bytes if parts == 1 else machines * npus * checkpoint_bytes / parts
    return 2 * kept
