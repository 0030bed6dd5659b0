"""Choose `model.depth` from `schedule.minutes`: the deepest model that is still trained long enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anabatic.config.pretrain import PretrainJob
from anabatic.device.table import Chip
from anabatic.plan import model_shape

TOKENS_PER_PARAM = 12.0
"""Training tokens per multiplying parameter (nanochat's compute-optimal ratio for this kind of model)."""
ASSUMED_UTILIZATION = 0.3
"""Share of a chip's peak, where only the order of magnitude is needed before the first step."""
MAX_DEPTH = 128


def is_left_open(job: Any) -> bool:
    """Return whether the depth of a new model follows from `schedule.minutes`."""
    return (
        isinstance(job, PretrainJob)
        and job.model.path is None
        and job.model.depth is None
        and job.schedule.minutes is not None
    )


def choose_depth(job: PretrainJob, chip: Chip, devices: int) -> int:
    """Return the largest depth whose model gets its tokens in `schedule.minutes`, 1 at least.

    A token costs 6 operations per multiplying parameter (arXiv 2001.08361, section 2.1). The speed is the chip's peak
    by its data sheet, so that a machine comes to the same depth each time.

    Args:
        devices: chips that share the work.
    """
    minutes = job.schedule.minutes
    assert minutes is not None
    operations = 60.0 * minutes * chip.half_tflops * 1e12 * ASSUMED_UTILIZATION * devices
    ratio = job.schedule.tokens_per_param or TOKENS_PER_PARAM
    depth = 1
    while depth < MAX_DEPTH:
        params = model_shape.get_job_shape(with_depth(job, depth + 1))[0].multiplying_params
        if operations < 6 * params * ratio * params:
            break
        depth += 1
    return depth


def with_depth(job: PretrainJob, depth: int) -> PretrainJob:
    """Return the job with this depth."""
    return replace(job, model=replace(job.model, depth=depth))
