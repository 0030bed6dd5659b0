"""Silent data corruption: copies of the weights on different ranks must have the same bits (`parallel.check_replicas`).

All copies start equal and get the same updates, so one that differs was changed by something else: a flipped bit, a
faulty core, a collective that delivered wrong data. Each rank adds up the bits of each of its tensors on its device;
the sums are gathered and compared. A change of one bit always changes a sum.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from anabatic.core import log
from anabatic.core.errors import ConfigError, Failure
from anabatic.parallel.collectives import all_gather_rows, all_gather_text
from anabatic.parallel.sharded_tensors import is_sharded_by_fsdp, to_local
from anabatic.parallel.world import World
from anabatic.train.checkpoint.run_state import TrainProgress
from anabatic.train.context import LoopContext
from anabatic.train.guards.straggler_rules import CopyMismatch, compare_copies

_BIT_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integers of the same size."""


class ReplicaCheck:
    """Compares the copies of all weights, trained or frozen, every `parallel.check_replicas` steps and before each
    checkpoint and evaluation, so that no checkpoint is made of copies that differ.

    Raises:
        ConfigError: the strategy keeps no copies.
    """

    def __init__(self, loop: LoopContext) -> None:
        self.loop, self.every = loop, loop.job.parallel.check_replicas
        self.last_good_step: int | None = None
        world = loop.world
        if self.every and loop.train_step.optimizer.is_sharded:
            raise ConfigError(
                f"parallel.check_replicas is {self.every}, but the weights are sharded: no rank has another's copy",
                "use --parallel.check-replicas 0, or --parallel.strategy ddp",
            )
        if self.every and world.gradient_group.size == 1:
            log.warn(
                f"parallel.check_replicas is {self.every}, but there is one copy of the weights: nothing to compare"
            )
            self.every = 0

    def check_when_due(self, progress: TrainProgress, saves: bool) -> None:
        """Compare the copies after this step if it is time, or if something is made of them; all ranks call it.

        Raises:
            Failure: they differ.
        """
        if self.every > 0 and (saves or progress.step % self.every == 0):
            self._check_copies(progress)

    def _check_copies(self, progress: TrainProgress) -> None:
        loop, step = self.loop, progress.step
        named = dict(loop.train_step.root.named_parameters())
        table = gather_checksums(list(named.values()), loop.world)
        found = compare_copies(table, list_copy_groups(loop.world))
        if found is None:
            self.last_good_step = step
            return
        names = [name.removeprefix("module.").removeprefix("model.") for name in named]
        place = f"{os.uname().nodename}, {loop.device.type}:{loop.device.index}"
        places = all_gather_text(place, loop.world)
        loop.metrics.log_event(
            "corrupt_copy",
            step=step,
            ranks=found.ranks,
            hosts=[places[rank] for rank in found.ranks],
            tensor=names[found.tensor],
            last_good_step=self.last_good_step,
        )
        raise Failure(
            f"step {step}: silent data corruption: {describe_mismatch(found, places, names, loop.world.size)};"
            f" {self._describe_last_good()}",
            "test that device, or leave it out, then start the same command again: it continues from the newest"
            " checkpoint, whose weights were compared before they were saved",
        )

    def _describe_last_good(self) -> str:
        if self.last_good_step is None:
            return "they were not compared before in this run"
        return f"they were equal after step {self.last_good_step}"


def describe_mismatch(found: CopyMismatch, places: list[str], names: list[str], size: int) -> str:
    """Return in words which ranks' weights differ, and where first."""
    ranks = ", ".join(f"rank {rank} ({places[rank]})" for rank in found.ranks)
    first = f"first in {names[found.tensor]}"
    if not found.has_majority:
        return f"the copies of the weights on {ranks} differ from each other, {first}; which is right is not known"
    others = size - len(found.ranks)
    return (
        f"the weights of {ranks} differ from those of the other {others} {'rank' if others == 1 else 'ranks'}, {first}"
    )


def list_copy_groups(world: World) -> list[list[int]]:
    """Return the ranks that hold the same part of the model, for each part."""
    parts = world.tensor_group.size * world.expert_group.size
    return [list(range(part, world.size, parts)) for part in range(parts)]


def gather_checksums(tensors: list[Tensor], world: World) -> list[list[tuple[int, ...]]]:
    """Return two sums of the bits of each tensor, for each rank; all ranks call this."""
    own = torch.stack([sum_bits(tensor) for tensor in tensors])
    rows = all_gather_rows(own[None], world).tolist()
    return [[tuple(sums) for sums in rank] for rank in rows]


@torch.no_grad()
def sum_bits(tensor: Tensor) -> Tensor:
    """Return `[2]`: the sum of a tensor's bit patterns as integers, and of their squares modulo 2^64.

    Two changes that cancel in the first sum show in the second.
    """
    if is_sharded_by_fsdp(tensor, is_expert=True):
        raise ValueError("a shard has no copy")
    bits = to_local(tensor).detach().contiguous().view(-1)
    bits = bits.view(_BIT_VIEWS[bits.element_size()])
    return torch.stack((bits.sum(dtype=torch.int64), (bits * bits).sum(dtype=torch.int64)))
