"""Process groups of a job, collectives that also work with one process, and functions for sharded tensors.

The ranks form a mesh (`mesh.py`): ranks of a context group share the tokens of a batch, ranks of a tensor group work on
the same tokens, each with its shard of every divided matrix. Gradients are added over all ranks with the same shard.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    SHARD_DIMENSIONS,
    SINGLE_CONTEXT,
    SINGLE_RANK,
    ContextGroup,
    RankGroup,
    RankMesh,
)
from anabatic.plan.mesh_shape import MeshShape, resolve_mesh_shape

if TYPE_CHECKING:  # half a second of imports, for several processes alone
    from torch.distributed.tensor import DTensor, Placement

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


def gather_text(text: str, group: RankGroup) -> list[str]:
    """Return every rank's text on rank 0 of the group, in the order of ranks; nothing on the others."""
    if group.size == 1:
        return [text]
    texts = [""] * group.size if group.rank == 0 else None
    dist.gather_object(text, texts, dst=0, group=group.process_group)
    return texts or []


def all_gather_rows(rows: Tensor, world: RankGroup) -> Tensor:
    """Stack the ranks' equally shaped `[n, ...]` tensors into `[size x n, ...]`."""
    if world.size == 1:
        return rows
    out = rows.new_empty(world.size * rows.shape[0], *rows.shape[1:])
    # torch 2.13 renamed all_gather_into_tensor and warns; older releases have only the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    gather(out, rows.contiguous(), group=world.process_group)
    return out


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


def time_slowest_rank(
    call: Callable[[], object], repeats: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Return the seconds of `repeats` calls on the slowest rank of a group; all ranks call this.

    Args:
        device: device of the tensors, synchronized before time is read.
    """
    elapsed = torch.zeros(1, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
    float(elapsed)  # waits until all ranks are here and their devices are idle
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()
    elapsed.fill_(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX, group=group)
    return float(elapsed)


def count_calls(
    call: Callable[[], object],
    device: torch.device,
    seconds: float,
    max_calls: int,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Return how many calls take about `seconds`, at least 1, equal on every rank; a first call sets up connections."""
    time_slowest_rank(call, 1, device, group)
    return max(1, min(max_calls, int(seconds / time_slowest_rank(call, 1, device, group))))


TensorSlices = tuple[slice, ...]
"""Slices of the full tensor that a rank holds."""


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """True when this rank holds only a shard."""
    module = sys.modules.get("torch.distributed.tensor")  # no sharded tensor is made without it
    return isinstance(tensor, getattr(module, "DTensor", ()))


def is_sharded_along(tensor: Tensor, axis: str) -> bool:
    """True when the tensor is sharded along the dimension `axis` of the mesh."""
    if not is_sharded(tensor):
        return False
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return any(axis in name.split("_") and not placement.is_replicate() for name, placement in axes)


def is_sharded_by_fsdp(tensor: Tensor, is_expert: bool = False) -> bool:
    """True when ranks whose gradients are added hold different shards of the tensor (`sharding.py`).

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
