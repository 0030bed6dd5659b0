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
from anabatic.parallel.process_groups import RankGroup
from anabatic.plan import decoder_shape, detect_chip, strategy_search, training_setup
from anabatic.plan.decoder_shape import DecoderShape
from anabatic.plan.training_setup import TrainingSetup

_UNKNOWN_CHIP = Chip("unknown", 100.0, 0, 1000)
"""Speeds that rank the ways of a job on a chip that is in no table; an order of magnitude, no more."""


def get_local_chip(device: Device, free: bool = False) -> Chip:
    """Return this process's device as a row of the chips, with the memory that it reports.

    Args:
        free: what is free now, not all: it changes from start to start.
    """
    if device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        row = detect_chip.describe_processor(local)
        return row if free else replace(row, memory_gib=device.get_total_memory() / 2**30 / local)
    row = device.chip or replace(_UNKNOWN_CHIP, name=device.name)
    if free:
        return replace(row, memory_gib=device.get_free_memory() / 2**30, taken_gib=0.0)
    return replace(
        row, memory_gib=device.get_total_memory() / 2**30, taken_gib=strategy_search.get_unavailable_gib(row)
    )


def build_job_setup(job: Any, found: DecoderShape, device: Device, world: RankGroup) -> TrainingSetup:
    """Return what of a job decides its memory on this device.

    Args:
        world: ranks with different data.
    """
    return training_setup.build_setup(
        job, found, world.size, device.device_row, device.dtype.itemsize == 2, job.batch.resolved_seq_len, 1
    )


def build_model_setup(job: Any, model: PreTrainedModel, device: Device, world: RankGroup) -> TrainingSetup | None:
    """Return the same for a model that is there; None, with a log line, where its blocks are of another kind."""
    try:
        found = decoder_shape.read_shape(model.config.to_dict(), "the model's configuration")
    except DataError as error:
        log.info(f"what fits is not planned, batch.micro_batch_tokens can say it: {error}")
        return None
    return build_job_setup(job, found, device, world)
