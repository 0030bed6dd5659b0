"""The plan's view of a training that is about to begin: its shape, its settings, this device."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.device.device import Device
from anabatic.device.table import Chip
from anabatic.parallel.world import Group
from anabatic.plan import fit, here, setup, shape
from anabatic.plan.setup import Setup
from anabatic.plan.shape import Shape

_UNKNOWN = Chip("unknown", 100.0, 0, 1000)
"""Speeds that rank the ways of a job on a chip that is in no table; an order of magnitude, no more."""


def chip_of(device: Device, free: bool = False) -> Chip:
    """Return this process's device as a row of the chips, with the memory that it reports.

    Args:
        free: what is free now, not all: it changes from start to start.
    """
    if device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        row = here.processor(local)
        return row if free else replace(row, memory_gib=device.memory_bytes() / 2**30 / local)
    row = device.chip or replace(_UNKNOWN, name=device.name)
    if free:
        return replace(row, memory_gib=device.free_bytes() / 2**30, taken_gib=0.0)
    return replace(row, memory_gib=device.memory_bytes() / 2**30, taken_gib=fit.beside(row))


def setup_of(job: Any, found: Shape, device: Device, world: Group) -> Setup:
    """Return what of a job decides its memory on this device.

    Args:
        world: ranks with different data.
    """
    return setup.of(job, found, world.size, device.row, device.dtype.itemsize == 2, job.batch.length, 1)


def of_model(job: Any, model: PreTrainedModel, device: Device, world: Group) -> Setup | None:
    """Return the same for a model that is there; None, said aloud, where its blocks are of another kind."""
    try:
        found = shape.read(model.config.to_dict(), "the model's configuration")
    except DataError as error:
        log.info(f"what fits is not planned, batch.micro_batch_tokens can say it: {error}")
        return None
    return setup_of(job, found, device, world)
