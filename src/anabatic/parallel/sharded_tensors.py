"""Tensors of which each rank holds a shard (DTensor): their parts, the full tensor, memory for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from anabatic.parallel.mesh import (
    EXPERT_COPY_DIMENSIONS,
    SHARD_DIMENSIONS,
)

if TYPE_CHECKING:  # half a second of imports, for several processes alone
    from torch.distributed.tensor import DTensor, Placement


TensorSlices = tuple[slice, ...]
"""Slices of the full tensor that a rank holds."""


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether this rank holds only a shard."""
    module = sys.modules.get("torch.distributed.tensor")  # no sharded tensor is made without it
    return isinstance(tensor, getattr(module, "DTensor", ()))


def is_sharded_along(tensor: Tensor, axis: str) -> bool:
    """Return whether the tensor is sharded along the dimension `axis` of the mesh."""
    if not is_sharded(tensor):
        return False
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return any(axis in name.split("_") and not placement.is_replicate() for name, placement in axes)


def is_sharded_by_fsdp(tensor: Tensor, is_expert: bool = False) -> bool:
    """Return whether ranks whose gradients are summed hold different shards of the tensor (`sharding.py`).

    Args:
        is_expert: it is a divided expert's, which ranks of an expert group never share.
    """
    return any(is_sharded_along(tensor, axis) for axis in (EXPERT_COPY_DIMENSIONS if is_expert else SHARD_DIMENSIONS))


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares memory and may be empty; a plain tensor is returned as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; every rank of a sharded one must call this.

    A shard that is offloaded to the host is copied to the mesh's device first, where the collective runs.
    """
    if not is_sharded(tensor):
        return tensor
    mesh, part = tensor.device_mesh, tensor.to_local()
    if part.device.type == mesh.device_type:
        return tensor.full_tensor()
    from torch.distributed.tensor import DTensor

    device_part = part.to(torch.accelerator.current_accelerator())
    device_tensor = DTensor.from_local(
        device_part, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return device_tensor.full_tensor()


def gather_full_stack(parts: Tensor, tensor: Tensor) -> Tensor:
    """Return `n` full tensors that are sharded like `tensor`, in one collective.

    Args:
        parts: `[n, ...]`, the shards of this rank.
    """
    if not is_sharded(tensor):
        return parts
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size((len(parts), *tensor.shape))
    placements = [_shift_placement(placement) for placement in tensor.placements]
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(tensor.device_mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, parts.dtype))
    return gather_full_tensor(DTensor(parts, spec, requires_grad=False))  # type: ignore[call-arg]


def _shift_placement(placement: Placement) -> Placement:
    """Return the same placement for a tensor with one more dimension in front."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def shard_like(part: Tensor, tensor: Tensor) -> Tensor:
    """Return `part`, the shard of this rank, as a tensor sharded like `tensor`; memory is shared.

    `DTensor.from_local` would copy a shard on the host to the mesh's device.
    """
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor(part, tensor._spec, requires_grad=False)  # type: ignore[call-arg, no-any-return]


def get_local_slices(tensor: Tensor) -> TensorSlices:
    """Return the slices of the full tensor that this rank holds."""
    if not is_sharded(tensor):
        return tuple(slice(0, size) for size in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@torch.no_grad()
def fill_local_part(tensor: Tensor, read: Callable[[TensorSlices], Tensor]) -> None:
    """Copy the result of `read` for this rank's slices into `tensor`."""
    part = to_local(tensor)
    if part.numel():
        part.copy_(read(get_local_slices(tensor)))


@torch.no_grad()
def copy_from_full(tensor: Tensor, value: Tensor) -> None:
    """Copy this rank's part of the full `value` into `tensor`."""
    fill_local_part(tensor, lambda part: value[part])


def materialize_parameters(module: nn.Module, device: torch.device, buffers: torch.device) -> None:
    """Allocate parameters of the meta device on `device`, uninitialized; move buffers to the device `buffers`.

    `nn.Module.to_empty` would lose the content of buffers, and untie tied parameters.
    """
    materialized: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                if id(parameter) not in materialized:
                    empty = _allocate_like(parameter, device)
                    materialized[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                owner.register_parameter(name, materialized[id(parameter)])
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(buffers)


def _allocate_like(parameter: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialized tensor; `empty_like` of a plain one on the meta device imports sympy, half a second."""
    if is_sharded(parameter):
        return torch.empty_like(parameter, device=device)
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
