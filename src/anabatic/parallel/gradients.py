"""Gradient reduction with tensor parallelism, where no wrapper does it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from anabatic.parallel.dtensors import to_local
from anabatic.parallel.process_groups import RankGroup, World, all_reduce_sum

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
        average: take the mean over the data-parallel ranks, unless sharding has done so.
    """
    if world.tensor_group.size == 1:
        return
    _sum_grads(
        [_local_grad(param) for name, param in params.items() if name in partial], world.tensor_group, world, 1.0
    )
    if average and world.data_group.size > 1:
        _sum_grads(
            [_local_grad(param) for param in params.values()], world.data_group, world, 1 / world.data_group.size
        )


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
