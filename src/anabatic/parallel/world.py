"""The processes of a job, and collectives that also work for one."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.device.device import Device

TIMEOUT = timedelta(hours=2)
"""Longest wait of a collective: rank 0 may tokenise a large corpus while the others wait."""


@dataclass(frozen=True)
class World:
    """This process among the processes of the job."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """True on the rank that writes files and messages."""
        return self.rank == 0


def size() -> int:
    """Return how many processes the launcher's environment speaks of; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(device: Device) -> World:
    """Join the process group that the launcher's environment describes; alone without a launcher."""
    count = size()
    if count == 1:
        return World()
    # The device of this process is set already, and checkpoints gather a few names: neither is news to the user.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")
    warnings.filterwarnings("ignore", message=r".*doesn't support gather at the moment")
    dist.init_process_group(device.row.collective, timeout=TIMEOUT)
    return World(dist.get_rank(), count)


def stop(world: World) -> None:
    """Leave together: a process that leaves early takes the others' connections with it."""
    if world.size > 1 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    if world.size > 1:
        dist.barrier()


def all_sum(values: Tensor, world: World) -> Tensor:
    """Sum `values` over the ranks, in place, and return them."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def broadcast_text(text: str, world: World) -> str:
    """Return rank 0's text on every rank."""
    if world.size == 1:
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather_rows(mine: Tensor, world: World) -> Tensor:
    """Stack the ranks' equally shaped `[n, ...]` tensors into `[size x n, ...]`."""
    if world.size == 1:
        return mine
    out = mine.new_empty(world.size * mine.shape[0], *mine.shape[1:])
    # torch 2.13 renamed all_gather_into_tensor and warns; older releases have only the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(out, mine.contiguous())
    return out


def same_everywhere(value: float, world: World, device: torch.device) -> bool:
    """True when every rank holds the same number."""
    if world.size == 1:
        return True
    box = torch.tensor([value, -value], dtype=torch.float64, device=device)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return bool(box[0] == -box[1])
