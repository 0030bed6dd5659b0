"""Shard a model over the ranks, with workarounds for FSDP2 over gloo in older releases of torch.

`ddp` keeps a full model on every rank. `zero2` and `zero3` are FSDP2 (torch.distributed.fsdp.fully_shard):
parameters, gradients and optimizer state are sharded (arXiv 1910.02054); `zero3` gathers the weights of one block at a
time, `zero2` keeps them between the forward and the backward pass. With tensor parallelism (`tensor_linear.py`) "every
rank" is every rank with the same part of the model. Ranks that share the tokens of a batch (`context`) shard with the
others. With `replicate`, each of several groups of ranks holds all shards, and gradients are also averaged among them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from anabatic.config.sections.common import Parallel
from anabatic.core import log
from anabatic.core.errors import ConfigError, Failure
from anabatic.device.device import Device
from anabatic.parallel.mesh import EXPERT_COPY_DIMENSIONS, RankMesh
from anabatic.parallel.world import World

_BUCKET_MIB = 25
"""Gradients of a collective of DDP; torch's default."""
_DIVISORS = "_get_gradient_divide_factors"


def ensure_gloo_averages(mesh: DeviceMesh) -> None:
    """Make FSDP2 average gradients on the CPU; every rank of `mesh` calls this before sharding a model.

    Raises:
        Failure: gradients would be sums instead of averages, and this torch cannot be patched.
    """
    if not _can_average(mesh.get_group(mesh.ndim - 1)):
        _patch_to_average()


def _can_average(group: dist.ProcessGroup) -> bool:
    """Return whether gloo's reduce-scatter supports AVG; in torch 2.7 and 2.8 it sums silently.

    Source: pytorch/pytorch/issues/162338. With the collective's new name (torch 2.13) no check is needed.
    """
    if hasattr(dist, "reduce_scatter_single"):
        return True
    output = torch.zeros(1)
    dist.reduce_scatter_tensor(output, torch.ones(group.size()), op=dist.ReduceOp.AVG, group=group)
    return output.item() == 1.0


@functools.cache
def _patch_to_average() -> None:
    """Patch FSDP2 to reduce sums and divide them."""
    collectives = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    original = getattr(collectives, _DIVISORS, None)
    if original is None:
        raise Failure(
            f"gloo of torch {torch.__version__} sums gradients where it should average them",
            "use --parallel.strategy ddp on the CPU, or another torch",
        )

    def divide_sums(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        factors = original(group, *args, **kwargs)
        operations = (dist.ReduceOp.SUM,) * (len(factors) - 2)  # none up to torch 2.7, then one for each collective
        return (1.0, float(group.size()), *operations)

    setattr(collectives, _DIVISORS, divide_sums)
    log.debug(f"gloo of torch {torch.__version__} cannot average: gradients are summed, then divided")


ABSENT = "_anabatic_absent_parameters"
"""Attribute of a model with the parameters that other stages of a pipeline hold (`pipeline_parameters.py`)."""


def divides_model(world: World) -> bool:
    """Return whether ranks share the layers, the experts, the matrices or the tokens of one copy of the model."""
    groups = (world.tensor_group, world.context_group, world.expert_group, world.pipeline_group)
    return any(group.size > 1 for group in groups)


def get_absent(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of other stages, on the meta device, tied ones under each of their names."""
    found: dict[str, nn.Parameter] = model.__dict__.get(ABSENT, {})
    return found


def named_parameters_of_all(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of all stages, each once."""
    seen: set[int] = set()
    for name, parameter in (*model.named_parameters(), *get_absent(model).items()):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


ShardingStrategy = Literal["single", "ddp", "zero2", "zero3"]


@dataclass(frozen=True)
class ShardingPlan:
    """The resolved strategy.

    Attributes:
        strategy: see the module.
        is_offloaded: parameters, gradients and optimizer state are in host memory.
        reason: why it was chosen, for the log.
    """

    strategy: ShardingStrategy = "single"
    is_offloaded: bool = False
    reason: str = "one process"

    @property
    def is_sharded(self) -> bool:
        """True when each rank holds a shard of each parameter."""
        return self.strategy in ("zero2", "zero3")

    def get_state_device(self, device: Device) -> torch.device:
        """Return the device of parameters, gradients and optimizer state."""
        return torch.device("cpu") if self.is_offloaded else device.torch_device


def resolve_sharding(settings: Parallel, world: World, device: Device) -> ShardingPlan:
    """Resolve how the model is sharded among the data-parallel ranks, and why.

    Raises:
        ConfigError: `single` with several data-parallel ranks.
    """
    ranks = world.gradient_group.size
    if settings.strategy == "single" and ranks > 1:
        raise ConfigError(
            f"parallel.strategy is single, but {world.size} processes run", "use ddp, or --device.nproc 1"
        )
    if ranks == 1:
        reason = "one process" if world.size == 1 else f"{world.size} processes work on the same data"
        if settings.strategy not in ("auto", "single"):
            reason = f"{reason}: nothing to divide by {settings.strategy}"
        if settings.offload == "cpu":
            log.warn("parallel.offload cpu needs several processes: weights stay on the device")
        return ShardingPlan(reason=reason)
    if settings.strategy in ("auto", "ddp"):
        return ShardingPlan("ddp", reason="asked for" if settings.strategy == "ddp" else f"auto: {ranks} processes")
    offload = settings.offload == "cpu" and device.type != "cpu"
    if settings.offload == "cpu" and not offload:
        log.warn("parallel.offload cpu changes nothing on a cpu: all memory is the host's")
    return ShardingPlan("zero2" if settings.strategy == "zero2" else "zero3", offload, "asked for")


def shard_model(
    root: nn.Module,
    units: list[nn.Module],
    plan: ShardingPlan,
    device: Device,
    world: World,
    divided: Sequence[nn.Module] = (),
) -> None:
    """Shard the parameters of `root`, in place; they may be on the meta device. `single` and `ddp` shard nothing.

    Args:
        root: module whose forward pass runs the model; parameters outside `units` are gathered for all of it.
        units: modules gathered one at a time, not nested.
        divided: layers of experts inside them, which ranks of an expert group divide: only ranks with the same experts
            shard those.
    """
    if not plan.is_sharded:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    param_dtype = None if device.dtype == torch.float32 else device.dtype
    options: dict[str, Any] = {
        "mesh": (world.mesh or RankMesh(device.type, world.shape)).get_fsdp_mesh(),
        "reshard_after_forward": _keep_root() if plan.strategy == "zero3" else False,
        # Matrix products and communication in the compute dtype, gradient sums in fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    if plan.is_offloaded:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.device_row.pin_memory)
    if device.type == "cpu":
        ensure_gloo_averages(options["mesh"])
    if divided and world.expert_copies.size > world.shape.replicate:
        assert world.mesh is not None
        for layer in divided:
            fully_shard(layer, **{**options, "mesh": world.mesh.get_fsdp_mesh(EXPERT_COPY_DIMENSIONS[1:])})
    elif divided:  # no rank of a copy has the same experts
        options["ignored_params"] = {parameter for layer in divided for parameter in layer.parameters()}
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(root, **options)


@functools.cache
def _keep_root() -> bool | None:
    """Return the option of FSDP2 that frees the blocks after their forward pass, but not the root module.

    Its backward pass begins at once and would gather the same weights again. Up to torch 2.7 this is what True means.
    """
    from torch.distributed.fsdp import fully_shard

    return None if inspect.signature(fully_shard).parameters["reshard_after_forward"].default is None else True


def wrap_ddp(root: nn.Module, plan: ShardingPlan, device: Device, world: World) -> nn.Module:
    """Return the module that a step calls: with `ddp` a wrapper that averages gradients during the backward pass, else
    `root`.

    The wrapper does not support sharded matrices: with tensor parallelism gradients are averaged afterwards
    (`reduce_tensor_gradients`), and with stages of a pipeline, whose passes overlap (`reduce_stage_gradients`).
    `gradient_as_bucket_view` saves a copy of the gradients.
    """
    if plan.strategy != "ddp" or world.tensor_group.size > 1 or world.pipeline_group.size > 1:
        return root
    experts: frozenset[str] = getattr(root, "expert_params", frozenset())
    if experts:  # reduced afterwards, over other ranks (`reduce_expert_gradients`)
        trained = {f"model.{name}" for name in experts}
        if all(name in trained for name, parameter in root.named_parameters() if parameter.requires_grad):
            return root
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, [f"model.{name}" for name in experts])
    ids = None if device.type == "cpu" else [device.index]
    # Its size named, DDP makes no smaller first bucket, which would be one collective more.
    options = {"bucket_cap_mb": _BUCKET_MIB, "gradient_as_bucket_view": True, **_no_buffer_sync()}
    return DistributedDataParallel(root, device_ids=ids, **options)


@functools.cache
def _no_buffer_sync() -> dict[str, Any]:
    """Return the option of DDP under its name: torch 2.13 renamed broadcast_buffers and warns of the old name."""
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if renamed else "broadcast_buffers": False}


def reshard_weights(root: nn.Module) -> None:
    """Free the gathered weights that a forward pass without a backward pass leaves behind."""
    if "torch.distributed.fsdp" not in sys.modules:  # no module is sharded without it
        return
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
