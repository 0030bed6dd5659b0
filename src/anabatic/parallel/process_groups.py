"""The processes of a job, and collectives that also work for one.

With tensor parallelism the job's processes form a grid: `tensor` neighbours work on the same data, each with its part
of every divided matrix; processes with the same part stand for one another in data parallelism.
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
"""Longest wait of a collective: rank 0 may tokenise a large corpus while the others wait."""


@dataclass(frozen=True)
class RankGroup:
    """Some processes of the job, this one among them.

    Attributes:
        process_group: torch's process group; None: all processes.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


SINGLE_RANK = RankGroup()


@dataclass(frozen=True)
class World(RankGroup):
    """This process among the processes of the job.

    Attributes:
        tensor_group: those that work on the same data.
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
        """Those that hold the same part of the model, each with its own share of the data."""
        if self.mesh is None:
            return self
        return RankGroup(
            self.mesh.get_local_rank("data"), self.size // self.tensor_group.size, self.mesh.get_group("data")
        )


def get_world_size() -> int:
    """Return how many processes the launcher's environment speaks of; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_world(device: Device, tensor: int = 1) -> World:
    """Join the process group that the launcher's environment describes; alone without a launcher.

    Args:
        tensor: processes that work on the same data.

    Raises:
        ConfigError: the processes cannot be divided by `tensor`.
    """
    count = get_world_size()
    if count % tensor:
        raise ConfigError(
            f"parallel.tensor is {tensor}, which does not divide {count} {'process' if count == 1 else 'processes'}",
            f"start a multiple of {tensor}, for one machine by --device.nproc {-(-count // tensor) * tensor}",
        )
    if count == 1:
        return World()
    # The device of this process is set already, and checkpoints gather a few names: neither is news to the user.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    warnings.filterwarnings("ignore", message=r".*doesn't support gather at the moment")
    HEARTBEAT.record_beat(STEP_JOINING)
    dist.init_process_group(device.device_row.collective, timeout=COLLECTIVE_TIMEOUT)
    HEARTBEAT.record_beat(STEP_NOT_TRAINING)
    if tensor == 1:
        return World(dist.get_rank(), count)
    # Parts of parts are gathered in two steps when a model is saved, which torch warns of each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mesh = init_device_mesh(device.type, (count // tensor, tensor), mesh_dim_names=("data", "tensor"))
    neighbours = RankGroup(mesh.get_local_rank("tensor"), tensor, mesh.get_group("tensor"))
    return World(dist.get_rank(), count, tensor_group=neighbours, mesh=mesh)


def leave_world(world: World) -> None:
    """Leave together: a process that leaves early takes the others' connections with it."""
    if world.size > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def create_side_group(world: World) -> RankGroup:
    """Return all ranks as a group of its own over the host's network (gloo), for a thread beside the training.

    Two threads of a process must not share a group: their collectives would meet in another order on every rank.

    Raises:
        Failure: the hosts do not reach one another.
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
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_text(text: str, world: World) -> list[str]:
    """Return every rank's text, in the order of ranks."""
    if world.size == 1:
        return [text]
    texts = [""] * world.size
    dist.all_gather_object(texts, text)
    return texts


def all_gather_rows(mine: Tensor, world: World) -> Tensor:
    """Stack the ranks' equally shaped `[n, ...]` tensors into `[size x n, ...]`."""
    if world.size == 1:
        return mine
    out = mine.new_empty(world.size * mine.shape[0], *mine.shape[1:])
    # torch 2.13 renamed all_gather_into_tensor and warns; older releases have only the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(out, mine.contiguous())
    return out
