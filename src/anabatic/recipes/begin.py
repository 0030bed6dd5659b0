"""How every training begins and ends: the processes, the run folder, the checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from anabatic.config import deepspeed
from anabatic.config.train import LoopJob
from anabatic.core import log
from anabatic.core.paths import RunFolder
from anabatic.device.device import Device, pick
from anabatic.parallel import world as parallel
from anabatic.parallel.world import World
from anabatic.train import plan as planning
from anabatic.train.checkpoint import Found
from anabatic.train.run import find_checkpoint, open_folder

Job = TypeVar("Job", bound=LoopJob)


@contextmanager
def begun(job: Job) -> Iterator[tuple[Job, RunFolder, Device, World, Found | None]]:
    """Yield the job with what a DeepSpeed file says of it, its folder, the device, the processes, and the checkpoint.

    Raises:
        ConfigError: the processes do not fit the job, or the run folder holds another one.
        Failure: the folder cannot be written, or another job works in it.
    """
    job, told, lost = deepspeed.apply(job, max(1, parallel.size() // job.parallel.tensor))
    device = pick(job.device)
    world = parallel.start(device, job.parallel.tensor)
    planning.require_divisible(job.batch, world.data)
    with open_folder(job, device, world) as folder:
        if told:
            log.info(told)
        if lost:
            log.warn(lost)
        yield job, folder, device, world, find_checkpoint(job, folder, world)
    parallel.stop(world)
