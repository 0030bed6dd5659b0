"""What a run needs beside its devices: the host's memory, the disk, energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabatic.device.table import PROCESSOR, Chip
from anabatic.plan.memory import gradient_bytes, held
from anabatic.plan.setup import Setup

PROGRAM = 0.5 * 2**30
"""Bytes of a process with torch, transformers and our program, before it has a model: the resident set of
`anabatic sft` on a CPU (docs/dev/LOG.md); drivers take more, which was not measured."""
DISK = 1e9
"""Bytes a second that a checkpoint is written at: an assumption; local disks may be faster, networks slower."""
FILE = 4.0 * 2**30
"""Bytes of weights that the rank which writes a model gathers in the host's memory for a file (`models/stored.py`)."""
_SMALL_IDS = 1 << 16
"""Vocabularies up to here are stored in two bytes an id, larger ones in four (`data/shards.py`)."""


@dataclass(frozen=True)
class Around:
    """Bytes, and kilowatt-hours.

    Attributes:
        host: of each machine's memory, by part.
        checkpoint, model: one checkpoint; one saved model or adapter.
        disk: by part; the tokenised data only where their size is known.
        kwh: of the devices at the maker's largest power for the whole run; None: no power is published, or the run's
            length is not known.
    """

    host: dict[str, float]
    checkpoint: float
    model: float
    disk: dict[str, float]
    kwh: float | None


def around(setup: Setup, job: Any, chip: Chip, npus: int, seconds: float, tokens: int | None) -> Around:
    """Return what a job needs.

    Args:
        npus: devices of a machine.
        seconds: of the run; 0: not known.
        tokens: of one pass over the data; None: not known.
    """
    share = npus / setup.world
    checkpoint = setup.tensor * sum(held(setup)[name] for name in ("trained weights", "optimizer"))
    kept = ("trained weights",) if setup.tuner == "lora" else ("trained weights", "frozen weights")
    model = setup.tensor * sum(held(setup)[name] for name in kept)  # as they are trained, not in half the bytes
    host = {"programs": npus * PROGRAM}
    if chip.name != PROCESSOR:
        host["a file of the saved model"] = min(model, FILE)
    if setup.offload:
        host["offloaded weights and optimizer"] = share * setup.tensor * sum(held(setup).values())
        host["offloaded gradients"] = share * setup.tensor * gradient_bytes(setup) * setup.trained
    if job.save.background != "off":
        host["a copy of the checkpoint"] = share * checkpoint
    copies = job.save.keep_last + job.save.keep_best + 1  # a new one is whole before an old one goes
    disk = {f"checkpoints, {copies} at most": copies * checkpoint, "best and final model": 2 * model}
    if tokens is not None:
        chats = 0 if not hasattr(job, "tuner") else 1  # which tokens are learned
        disk["tokenised data"] = tokens * (chats + (2.0 if setup.shape.vocab <= _SMALL_IDS else 4.0))
    kwh = chip.watts * setup.world * seconds / 3.6e6 if chip.watts and seconds else None
    return Around(host, checkpoint, model, disk, kwh)
