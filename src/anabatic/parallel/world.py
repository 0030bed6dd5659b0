"""All processes of a job: joining and leaving them, and the groups of the mesh that this process belongs to.

The ranks form a mesh (`mesh.py`): ranks of a context group share the tokens of a batch, ranks of a tensor group work on
the same tokens, each with its shard of every divided matrix.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from anabatic.config.sections.common import Parallel
from anabatic.core import log
from anabatic.core.errors import Failure
from anabatic.core.heartbeat import HEARTBEAT, STEP_JOINING, STEP_NOT_TRAINING
from anabatic.core.process_info import allow_open_files
from anabatic.device.device import Device
from anabatic.parallel import group_objects
from anabatic.parallel.mesh import (
    BATCH_DIMENSIONS,
    EXPERT_COPY_DIMENSIONS,
    GRADIENT_DIMENSIONS,
    SINGLE_CONTEXT,
    SINGLE_RANK,
    ContextGroup,
    RankGroup,
    RankMesh,
)
from anabatic.plan.mesh_shape import MeshShape, resolve_mesh_shape

if TYPE_CHECKING:  # half a second of imports, for several processes alone
    pass


_SPARE_FILES = 1024
"""Files that a rank opens besides the connections to the others: data, checkpoints, the device's driver."""
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Timeout of a collective: rank 0 may download a model or write a checkpoint while the others wait."""


@dataclass(frozen=True)
class World(RankGroup):
    """All processes of the job.

    Attributes:
        shape: sizes of the mesh's dimensions; those of a single process by default.
        mesh: the mesh; None with one process, or if all processes have different batches and copies of the model.
        batch_ranks, gradient_ranks: see the properties; None: all processes.
        context_group: ranks that share the tokens of a batch.
        expert_group: ranks that share the experts of a layer.
        expert_copies: ranks with the same experts.
        tensor_group: ranks that share the matrices of a layer, and work on the same tokens.
        pipeline_group: stages of one copy of the model, in order; they work on the same tokens.
        pipeline_chunks: parts of the layers that each stage has.
    """

    shape: MeshShape = MeshShape()
    mesh: RankMesh | None = None
    batch_ranks: RankGroup | None = None
    gradient_ranks: RankGroup | None = None
    context_group: ContextGroup = SINGLE_CONTEXT
    expert_group: RankGroup = SINGLE_RANK
    expert_copies: RankGroup = SINGLE_RANK
    tensor_group: RankGroup = SINGLE_RANK
    pipeline_group: RankGroup = SINGLE_RANK
    pipeline_chunks: int = 1

    @property
    def is_main_process(self) -> bool:
        """True on the rank that writes files and messages."""
        return self.rank == 0

    @property
    def data_group(self) -> RankGroup:
        """Return the ranks with different batches; their `rank` is the number of this rank's batch."""
        return self if self.batch_ranks is None else self.batch_ranks

    @property
    def gradient_group(self) -> RankGroup:
        """Return the ranks with the same part of the model, each with other tokens: their gradients are added."""
        return self if self.gradient_ranks is None else self.gradient_ranks

    @property
    def is_last_stage(self) -> bool:
        """True on the stage of a pipeline that computes the loss; always without a pipeline."""
        return self.pipeline_group.rank == self.pipeline_group.size - 1

    @property
    def counts_batch(self) -> bool:
        """True on the one rank of those with the same batch that counts its rows, tokens and targets."""
        return self.context_group.rank == 0 and self.tensor_group.rank == 0 and self.is_last_stage


def get_world_size() -> int:
    """Return the world size in the launcher's environment; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_world(device: Device, settings: Parallel | None = None) -> World:
    """Join the process group of the launcher's environment; a single process without a launcher.

    Args:
        settings: dimensions of the mesh; None: every rank has a copy of the model and batches of its own.

    Raises:
        ConfigError: the dimensions do not divide the world size.
    """
    world_size = get_world_size()
    if world_size == 1 and settings is None:
        return World()
    shape = resolve_mesh_shape(settings or Parallel(), world_size)
    if world_size == 1:
        return World()
    # The device of this process is already set, and checkpoints gather a few names: both warnings are harmless.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    warnings.filterwarnings("ignore", message=r".*doesn't support gather at the moment")
    _allow_connections(world_size)
    HEARTBEAT.record_beat(STEP_JOINING)
    group_objects.refuse_code()
    dist.init_process_group(device.device_row.collective, timeout=COLLECTIVE_TIMEOUT)
    HEARTBEAT.record_beat(STEP_NOT_TRAINING)
    return build_world(device, shape, settings)


def build_world(device: Device, shape: MeshShape, settings: Parallel | None = None) -> World:
    """Return the groups of a mesh of all processes, which have joined; every rank calls this.

    Args:
        shape: its size is the number of processes.
        settings: how context ranks compute attention, and the chunks of a pipeline's stages; None: the defaults.
    """
    settings = settings or Parallel()
    world_size = dist.get_world_size()
    if shape.shard == world_size:
        return World(dist.get_rank(), world_size, shape=shape)
    mesh = RankMesh(device.type, shape)
    context, pieces = mesh.get_group(("context",)), 2 if settings.context_method == "ring" else 1
    return World(
        dist.get_rank(),
        world_size,
        shape=shape,
        mesh=mesh,
        batch_ranks=None if shape.data_size == world_size else mesh.get_group(BATCH_DIMENSIONS),
        gradient_ranks=None if shape.gradient_size == world_size else mesh.get_group(GRADIENT_DIMENSIONS),
        context_group=ContextGroup(context.rank, context.size, context.process_group, pieces),
        expert_group=mesh.get_group(("expert",)),
        expert_copies=mesh.get_group(EXPERT_COPY_DIMENSIONS) if shape.expert > 1 else SINGLE_RANK,
        tensor_group=mesh.get_group(("tensor",)),
        pipeline_group=mesh.get_group(("pipeline",)),
        pipeline_chunks=settings.pipeline_chunks,
    )


def count_machine_ranks(world: World) -> tuple[int, int]:
    """Return the processes of a machine and the machines; where they differ in size, each process counts as one."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (local, world.size // local) if world.size % local == 0 else (1, world.size)


def _allow_connections(ranks: int) -> None:
    """Let this process open a connection to each rank: the store of rank 0 and gloo do."""
    limit = allow_open_files(ranks + _SPARE_FILES)
    if limit < ranks:
        log.warn(
            f"{ranks} ranks are more than the {limit} files that this process may open: rank 0 and gloo need a"
            " connection to each; raise the hard limit (ulimit -Hn)"
        )


def leave_world(world: World) -> None:
    """Destroy the process group on all ranks together: a rank that leaves early breaks the others' connections."""
    if world.size > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def create_side_group(
    world: World, purpose: str = "checkpoints in the background", without: str = "--save.background off"
) -> RankGroup:
    """Return a separate group of all ranks over the host network (gloo), for a background thread.

    Two threads of a process must not share a group: the order of their collectives would differ between ranks.

    Args:
        purpose, without: for the message: what the group is for, and the option that does without it.

    Raises:
        Failure: the hosts cannot reach each other.
    """
    if world.size == 1:
        return SINGLE_RANK
    try:
        return RankGroup(world.rank, world.size, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))
    except RuntimeError as error:
        raise Failure(
            f"the hosts' network is closed to {purpose}: {str(error).splitlines()[0]}",
            f"name the interface in GLOO_SOCKET_IFNAME, or use {without}",
        ) from error
