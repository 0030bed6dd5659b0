"""Process groups of a job, and collectives that also work with one process.

With tensor parallelism the ranks form a mesh `data x tensor`: ranks of a tensor group work on the same data, each with
its shard of every divided matrix; ranks with the same shard form a data-parallel group.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anabatic.core.errors import ConfigError, Failure
from anabatic.core.heartbeat import HEARTBEAT, STEP_JOINING, STEP_NOT_TRAINING
from anabatic.device.device import Device

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Timeout of a collective: rank 0 may tokenize a large corpus while the others wait."""


@dataclass(frozen=True)
class RankGroup:
    """A group of processes of the job that includes this one.

    Attributes:
        process_group: torch's process group; None: all processes.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


SINGLE_RANK = RankGroup()


@dataclass(frozen=True)
class World(RankGroup):
    """All processes of the job.

    Attributes:
        tensor_group: ranks that work on the same data.
        mesh: `data x tensor`; None without tensor parallelism.
    """

    tensor_group: RankGroup = SINGLE_RANK
    mesh: DeviceMesh | None = None

    @property
    def is_main_process(self) -> bool:
        """True on the rank that writes files and messages."""
        return self.rank == 0

    @property
    def data_group(self) -> RankGroup:
        """Return the ranks with the same part of the model, each with its own part of the data."""
        if self.mesh is None:
            return self
        return RankGroup(
            self.mesh.get_local_rank("data"), self.size // self.tensor_group.size, self.mesh.get_group("data")
        )


def get_world_size() -> int:
    """Return the world size in the launcher's environment; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_world(device: Device, tensor_size: int = 1) -> World:
    """Join the process group of the launcher's environment; a single process without a launcher.

    Args:
        tensor_size: ranks that work on the same data.

    Raises:
        ConfigError: the world size is not divisible by `tensor_size`.
    """
    world_size = get_world_size()
    if world_size % tensor_size:
        raise ConfigError(
            f"parallel.tensor is {tensor_size}, which does not divide {world_size}"
            f" {'process' if world_size == 1 else 'processes'}",
            f"start a multiple of {tensor_size}, for one machine by --device.nproc"
            f" {-(-world_size // tensor_size) * tensor_size}",
        )
    if world_size == 1:
        return World()
    # The device of this process is already set, and checkpoints gather a few names: both warnings are harmless.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    warnings.filterwarnings("ignore", message=r".*doesn't support gather at the moment")
    HEARTBEAT.record_beat(STEP_JOINING)
    dist.init_process_group(device.device_row.collective, timeout=COLLECTIVE_TIMEOUT)
    HEARTBEAT.record_beat(STEP_NOT_TRAINING)
    if tensor_size == 1:
        return World(dist.get_rank(), world_size)
    # Tensors sharded twice are gathered in two steps when a model is saved, and torch warns each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = init_device_mesh(device.type, (world_size // tensor_size, tensor_size), mesh_dim_names=("data", "tensor"))
    tensor_group = RankGroup(mesh.get_local_rank("tensor"), tensor_size, mesh.get_group("tensor"))
    return World(dist.get_rank(), world_size, tensor_group=tensor_group, mesh=mesh)


def leave_world(world: World) -> None:
    """Destroy the process group on all ranks together: a rank that leaves early breaks the others' connections."""
    if world.size > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def create_side_group(world: World) -> RankGroup:
    """Return a separate group of all ranks over the host network (gloo), for a background thread.

    Two threads of a process must not share a group: the order of their collectives would differ between ranks.

    Raises:
        Failure: the hosts cannot reach each other.
    """
    if world.size == 1:
        return SINGLE_RANK
    try:
        return RankGroup(world.rank, world.size, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))
    except RuntimeError as error:
        raise Failure(
            f"the hosts' network is closed to checkpoints in the background: {str(error).splitlines()[0]}",
            "name the interface in GLOO_SOCKET_IFNAME, or use --save.background off",
        ) from error


def barrier(group: RankGroup) -> None:
    """Wait until every rank of the group is here."""
    if group.size > 1:
        dist.barrier(group=group.process_group)


def all_reduce_sum(values: Tensor, world: RankGroup) -> Tensor:
    """Sum `values` over the ranks, in place, and return them."""
    if world.size > 1:
        dist.all_reduce(values, group=world.process_group)
    return values


def broadcast_text(text: str, world: World) -> str:
    """Return rank 0's text on every rank."""
    if world.size == 1:
        return text
    objects = [text]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def all_gather_text(text: str, world: World) -> list[str]:
    """Return every rank's text, in the order of ranks."""
    if world.size == 1:
        return [text]
    texts = [""] * world.size
    dist.all_gather_object(texts, text)
    return texts


def all_gather_rows(rows: Tensor, world: World) -> Tensor:
    """Stack the ranks' equally shaped `[n, ...]` tensors into `[size x n, ...]`."""
    if world.size == 1:
        return rows
    out = rows.new_empty(world.size * rows.shape[0], *rows.shape[1:])
    # torch 2.13 renamed all_gather_into_tensor and warns; older releases have only the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(out, rows.contiguous())
    return out
