"""Divide a model over the ranks, in one visible order.

`ddp` keeps a whole model on every rank. `zero2` and `zero3` are FSDP2 (torch.distributed.fsdp.fully_shard):
parameters, gradients and optimizer state lie in parts (arXiv 1910.02054); `zero3` gathers the weights of one block at
a time, `zero2` keeps them between the forward and the backward pass. With tensor parallelism (`tensor_linear.py`)
"every rank" is every rank that holds the same part of the model.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from anabatic.config.sections.parallel import Parallel
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.device.device import Device
from anabatic.parallel import torch_compat
from anabatic.parallel.process_groups import World

ShardingStrategy = Literal["single", "ddp", "zero2", "zero3"]


@dataclass(frozen=True)
class ShardingPlan:
    """What was settled on.

    Attributes:
        strategy: see the module.
        is_offloaded: parameters, gradients and optimizer state lie in the host's memory.
        reason: for the log.
    """

    strategy: ShardingStrategy = "single"
    is_offloaded: bool = False
    reason: str = "one process"

    @property
    def is_sharded(self) -> bool:
        """True when each rank holds a part of each parameter."""
        return self.strategy in ("zero2", "zero3")

    def get_state_device(self, device: Device) -> torch.device:
        """Where parameters, gradients and optimizer state lie."""
        return torch.device("cpu") if self.is_offloaded else device.torch_device


def resolve_sharding(wanted: Parallel, world: World, device: Device) -> ShardingPlan:
    """Decide how the model is divided among the ranks with different data, and say why.

    Raises:
        ConfigError: `single` with several such ranks.
    """
    ranks = world.data_group.size
    if wanted.strategy == "single" and ranks > 1:
        raise ConfigError(
            f"parallel.strategy is single, but {world.size} processes run", "use ddp, or --device.nproc 1"
        )
    if ranks == 1:
        why = "one process" if world.size == 1 else f"{world.size} processes work on the same data"
        if wanted.strategy not in ("auto", "single"):
            why = f"{why}: nothing to divide by {wanted.strategy}"
        if wanted.offload == "cpu":
            log.warn("parallel.offload cpu needs several processes: weights stay on the device")
        return ShardingPlan(reason=why)
    if wanted.strategy in ("auto", "ddp"):
        return ShardingPlan("ddp", reason="asked for" if wanted.strategy == "ddp" else f"auto: {ranks} processes")
    offload = wanted.offload == "cpu" and device.type != "cpu"
    if wanted.offload == "cpu" and not offload:
        log.warn("parallel.offload cpu changes nothing on a cpu: all memory is the host's")
    return ShardingPlan("zero2" if wanted.strategy == "zero2" else "zero3", offload, "asked for")


def shard_model(root: nn.Module, units: list[nn.Module], division: ShardingPlan, device: Device, world: World) -> None:
    """Divide the parameters of `root`, in place; they may be on the meta device. `single` and `ddp` divide nothing.

    Args:
        root: its forward pass runs the whole model; parameters outside `units` are gathered for all of it.
        units: modules gathered one at a time, none inside another.
    """
    if not division.is_sharded:
        return
    half = None if device.dtype == torch.float32 else device.dtype
    options: dict[str, Any] = {
        "mesh": world.mesh["data"] if world.mesh else _make_data_mesh(device, world),
        "reshard_after_forward": division.strategy == "zero3",
        # Matrix products and what is sent in the compute format, sums of gradients in fp32.
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False),
    }
    if division.is_offloaded:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.device_row.pin_memory)
    if device.type == "cpu":
        torch_compat.ensure_gloo_averages(options["mesh"])
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(root, **options)


def _make_data_mesh(device: Device, world: World) -> DeviceMesh:
    return init_device_mesh(device.type, (world.size,), mesh_dim_names=("data",))


def wrap_ddp(root: nn.Module, division: ShardingPlan, device: Device, world: World) -> nn.Module:
    """Return what a step calls: with `ddp` a wrapper that averages gradients during the backward pass, else `root`.

    The wrapper does not know parts of matrices: with tensor parallelism gradients are averaged afterwards
    (`gradients.py`). `gradient_as_bucket_view` saves a copy of the gradients.
    """
    if division.strategy != "ddp" or world.tensor_group.size > 1:
        return root
    ids = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(root, device_ids=ids, gradient_as_bucket_view=True, **_no_buffer_sync())


@functools.cache
def _no_buffer_sync() -> dict[str, Any]:
    """torch 2.13 renamed broadcast_buffers and warns; older releases have only the old name."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def reshard_weights(root: nn.Module) -> None:
    """Drop the gathered weights that a forward pass without a backward pass leaves behind."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
