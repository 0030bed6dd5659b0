"""How every training begins and ends: the processes, the run folder, the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from transformers import PreTrainedModel

from anabatic.config.sections.common import BatchSettings, DerivedSizes
from anabatic.config.sections.train_jobs import LoopJob, is_auto
from anabatic.core import log
from anabatic.core.formatting import format_count
from anabatic.device.device import Device, select_device
from anabatic.models import division
from anabatic.models.model_init import count_parameters
from anabatic.parallel.collectives import broadcast_text
from anabatic.parallel.sharding import ShardingPlan, divides_model, named_parameters_of_all
from anabatic.parallel.world import World, build_world, count_machine_ranks, init_world, leave_world
from anabatic.plan import model_shape
from anabatic.plan.mesh_shape import MeshShape, resolve_mesh_shape
from anabatic.plan.model_facts import ModelFacts, find_model_facts
from anabatic.recipes.layout_search import iter_layout_setups
from anabatic.recipes.resolve import Machine, resolve
from anabatic.recipes.training.trained_model import find_training_model
from anabatic.train import sizing
from anabatic.train.auto import out_of_memory
from anabatic.train.auto import state as auto_state
from anabatic.train.auto.layout_choice import apply_auto_strategy
from anabatic.train.checkpoint.storage import CheckpointInfo
from anabatic.train.context import TrainContext
from anabatic.train.run_folder import find_resume_checkpoint, open_run_folder

Job = TypeVar("Job", bound=LoopJob)


@contextmanager
def training_session(job: Job) -> Iterator[TrainContext[Job]]:
    """Yield where the training runs: the job with what a DeepSpeed file says of it, its folder, the device, the
    processes, and the checkpoint to resume from.

    Raises:
        ConfigError: the processes do not fit the job, or the run folder holds another one.
        Failure: the folder cannot be written, or another job works in it; memory ran out.
    """
    device = select_device(job.device)
    world = init_world(device)
    machine = Machine(None, *count_machine_ranks(world), is_planned=False)
    resolved = resolve(job, machine, find_training_model(job, world))
    job, world = resolved.job, _divide_world(world, resolved.mesh, resolved.job, device)
    with open_run_folder(job, device, world) as folder:
        if resolved.reads_hub_data:
            from anabatic.recipes import hub_data

            job = hub_data.pin_training_data(job, world)
        resolved.log_notes()
        checkpoint = find_resume_checkpoint(job, folder, world)
        model = resolved.model
        if not model.name:  # a new one, whose depth follows from the device
            job = _resolve_depth(job, checkpoint, device, world)
            model = find_model_facts(job)
        if is_auto(job):
            job, world = _apply_auto(job, model, device, world)
        try:
            yield TrainContext(job, folder, device, world, model, checkpoint)
        except out_of_memory.REFUSALS as error:
            out_of_memory.raise_advice(error, job, device, world, job.batch.resolved_seq_len)
            raise
    leave_world(world)


def find_resolved_batch(context: TrainContext[LoopJob]) -> BatchSettings | None:
    """Return the sizes that an earlier start has come to; None: this one settles them. Every rank calls it."""
    if context.resume_checkpoint is None and not is_auto(context.job):
        return None
    state = auto_state.load_state(context.job, context.world)
    return auto_state.get_resolved_batch(context.job, state, context.resume_checkpoint)


def _apply_auto(job: Job, model: ModelFacts, device: Device, world: World) -> tuple[Job, World]:
    """Return the job with the settings that `--auto` chose, and the processes in its mesh."""
    chosen = apply_auto_strategy(job, model, device, world, iter_layout_setups)
    return chosen, _divide_world(world, resolve_mesh_shape(chosen.parallel, world.size), chosen, device)


def _divide_world(world: World, shape: MeshShape, job: LoopJob, device: Device) -> World:
    """Return the processes in a mesh; the same ones, where they are in it."""
    settings = job.parallel
    if world.size == 1 or (shape, settings.pipeline_chunks) == (world.shape, world.pipeline_chunks):
        return world
    return build_world(device, shape, settings)


def _resolve_depth(job: Any, checkpoint: CheckpointInfo | None, device: Device, world: World) -> Any:
    """Return the job with the depth of the checkpoint, or the largest that its minutes suffice for on these devices."""
    if not model_shape.is_depth_left_open(job):
        return job
    if checkpoint is not None:
        return model_shape.with_depth(job, checkpoint.state.identity["model.depth"])
    depth = model_shape.choose_depth(job, sizing.get_local_chip(device), world.size)
    depth = int(broadcast_text(str(depth), world))  # processors of several machines may differ
    ratio = job.schedule.tokens_per_param or model_shape.TOKENS_PER_PARAM
    log.info(f"model.depth {depth}: about {ratio:g} tokens for each parameter in {job.schedule.minutes:g} minutes")
    return model_shape.with_depth(job, depth)


def log_plan(
    plan: DerivedSizes, model: PreTrainedModel, world: World, sharding: ShardingPlan, micro_steps: int = 1
) -> None:
    """Print every derived value with its reason."""
    params, multiplying = count_parameters(model)
    processes = "1 process" if world.size == 1 else f"{world.size} processes"
    log.info(
        f"{format_count(params)} parameters, {format_count(multiplying)} of them multiply every token, {processes}"
    )
    trained = sum(parameter.numel() for _, parameter in named_parameters_of_all(model) if parameter.requires_grad)
    if trained < params:
        log.info(f"{format_count(trained)} of them are trained ({trained / params:.2%})")
    log.info(
        f"strategy {sharding.strategy}{', offloaded to the host' if sharding.is_offloaded else ''} ({sharding.reason})"
    )
    parts = division.describe_division(model, world, micro_steps) if divides_model(world) else ()
    for line in (*parts, *plan.format_lines()):
        log.info(line)
