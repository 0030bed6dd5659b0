"""How every training begins and ends: the processes, the run folder, the checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from transformers import PreTrainedModel

from anabatic.config import deepspeed
from anabatic.config.shared import SEQ_LEN
from anabatic.config.train import LoopJob
from anabatic.core import log
from anabatic.core.paths import RunFolder
from anabatic.core.text import count
from anabatic.device.device import Device, pick
from anabatic.models import tensor
from anabatic.models.build import count_parameters
from anabatic.models.hf import base_of, load_config, resolve
from anabatic.parallel import world as parallel
from anabatic.parallel.shard import Division
from anabatic.parallel.world import World
from anabatic.plan import divide
from anabatic.plan.depth import Plan
from anabatic.recipes import length
from anabatic.train import auto
from anabatic.train.checkpoint import Found
from anabatic.train.run import find_checkpoint, open_folder

Job = TypeVar("Job", bound=LoopJob)


@contextmanager
def begun(job: Job) -> Iterator[tuple[Job, RunFolder, Device, World, Found | None]]:
    """Yield the job with what a DeepSpeed file says of it, its folder, the device, the processes, and the checkpoint.

    Raises:
        ConfigError: the processes do not fit the job, or the run folder holds another one.
        Failure: the folder cannot be written, or another job works in it; memory ran out.
    """
    job = length.follow(job)
    job, told, lost = deepspeed.apply(job, max(1, parallel.size() // job.parallel.tensor))
    device = pick(job.device)
    world = parallel.start(device, job.parallel.tensor)
    divide.require_batch(job.batch, world.data.size)
    job = length.follow(job, _positions(job, world))
    with open_folder(job, device, world) as folder:
        if told:
            log.info(told)
        if lost:
            log.warn(lost)
        job = auto.begin(job, device, world)
        with auto.out_of_memory(job, device, world, job.batch.length):
            yield job, folder, device, world, find_checkpoint(job, folder, world)
    parallel.stop(world)


def _positions(job: LoopJob, world: World) -> int | None:
    """The positions of a model whose folder does not tell them at once, a hub's for example; a new one takes any."""
    name = length.model_of(job)
    if job.batch.seq_len is not None or not name:
        return None
    config = load_config(base_of(resolve(name, getattr(job, "hub", None), world), getattr(job, "hub", None), world))
    return getattr(config, "max_position_embeddings", None) or SEQ_LEN


def say_plan(plan: Plan, model: PreTrainedModel, world: World, division: Division) -> None:
    """Print every derived value with its reason."""
    params, multiplying = count_parameters(model)
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    log.info(f"{count(params)} parameters, {count(multiplying)} of them multiply every token, {processes}")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if trained < params:
        log.info(f"{count(trained)} of them are trained ({trained / params:.2%})")
    log.info(f"strategy {division.strategy}{', offloaded to the host' if division.offload else ''} ({division.why})")
    if world.tensor.size > 1:
        log.info(tensor.summary(model, world.tensor.size))
    for line in plan.lines():
        log.info(line)
