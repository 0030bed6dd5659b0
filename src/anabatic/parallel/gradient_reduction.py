"""Reduction of gradients over all ranks with the same shard, where neither DDP nor FSDP2 does it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anabatic.parallel.collectives import all_reduce_sum
from anabatic.parallel.mesh import (
    RankGroup,
)
from anabatic.parallel.sharded_tensors import is_sharded_by_fsdp, to_local
from anabatic.parallel.world import World

if TYPE_CHECKING:  # half a second of imports, for several processes alone
    pass


MAX_BUCKET_ELEMENTS = 1 << 24
"""Most elements of one all-reduce, unless one gradient has more."""


@torch.no_grad()
def reduce_tensor_gradients(
    params: Mapping[str, Tensor], partial: Collection[str], average: bool, world: World
) -> None:
    """Reduce the gradients of trained parameters, in place.

    Args:
        partial: parameters that every rank holds in full but uses only for its part, such as the norm of the heads:
            their gradients are summed.
        average: take the mean over the ranks whose gradients are added, unless sharding has done so.
    """
    if world.tensor_group.size == 1:
        return
    _sum_grads(
        [_local_grad(param) for name, param in params.items() if name in partial], world.tensor_group, world, 1.0
    )
    group = world.gradient_group
    if average and group.size > 1:
        _sum_grads([_local_grad(param) for param in params.values()], group, world, 1 / group.size)


@torch.no_grad()
def reduce_stage_gradients(params: Mapping[str, Tensor], experts: Collection[str], world: World) -> None:
    """Take the mean of the gradients of a pipeline's stage over the ranks with the same one, in place; not of divided
    experts (`reduce_expert_gradients`)."""
    group = world.gradient_group
    if world.pipeline_group.size > 1 and group.size > 1:
        grads = [_local_grad(param) for name, param in params.items() if name not in experts]
        _sum_grads(grads, group, world, 1 / group.size)


@torch.no_grad()
def reduce_expert_gradients(params: Mapping[str, Tensor], experts: Collection[str], world: World) -> None:
    """Reduce the gradients of divided experts, in place: each is that of the tokens of all ranks that share them.

    The mean over the ranks with batches is wanted, as for all other parameters. Where FSDP2 has shards of them, it took
    the mean over the ranks with the same experts.
    """
    if world.expert_group.size == 1:
        return
    trained = [param for name, param in params.items() if name in experts]
    if any(is_sharded_by_fsdp(param, is_expert=True) for param in trained):
        torch._foreach_mul_([_local_grad(param) for param in trained], 1 / world.expert_group.size)
    else:
        _sum_grads(map(_local_grad, trained), world.expert_copies, world, 1 / world.gradient_group.size)


def _local_grad(param: Tensor) -> Tensor:
    """Return this rank's shard of a gradient; zeros if the parameter has no gradient here."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return to_local(param.grad)


def _sum_grads(grads: Iterable[Tensor], group: RankGroup, world: World, factor: float) -> None:
    for bucket in _split_into_buckets([grad for grad in grads if grad.numel()]):
        device = bucket[0].device
        collective_device = device if world.mesh is None else torch.device(world.mesh.device_type)
        flat = torch.cat([grad.reshape(-1) for grad in bucket]).to(
            collective_device
        )  # offloaded gradients are on the host
        chunks = all_reduce_sum(flat, group).mul_(factor).to(device).split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [chunk.view(grad.shape) for chunk, grad in zip(chunks, bucket, strict=True)])


def _split_into_buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for grad in sorted(grads, key=lambda grad: str(grad.dtype)):
        if bucket and (size + grad.numel() > MAX_BUCKET_ELEMENTS or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket
