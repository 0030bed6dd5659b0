"""What releases of torch before the one that is pinned lack when a CPU's processes share a model out (FSDP2 over gloo).

Devices have collectives of their own, which average.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from anabatic.core import log
from anabatic.core.errors import Failure

_DIVISORS = "_get_gradient_divide_factors"


def ensure_gloo_averages(mesh: DeviceMesh) -> None:
    """Make FSDP2 work on the CPU; every rank of `mesh` calls this before it shares a model out.

    Raises:
        Failure: gradients would be sums instead of averages, and this torch cannot be told otherwise.
    """
    if not _can_average(mesh.get_group()):
        _patch_to_average()


def _can_average(group: dist.ProcessGroup) -> bool:
    """Say whether gloo's reduce-scatter averages when it is asked to; that of torch 2.7 and 2.8 sums, without a word.

    Source: pytorch/pytorch/issues/162338. Where the collective has its new name (torch 2.13) there is nothing to ask.
    """
    if hasattr(dist, "reduce_scatter_single"):
        return True
    mine = torch.zeros(1)
    dist.reduce_scatter_tensor(mine, torch.ones(group.size()), op=dist.ReduceOp.AVG, group=group)
    return mine.item() == 1.0


@functools.cache
def _patch_to_average() -> None:
    """Have FSDP2 ask for the sum, and divide it."""
    collectives = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    known = getattr(collectives, _DIVISORS, None)
    if known is None:
        raise Failure(
            f"gloo of torch {torch.__version__} sums gradients where it should average them",
            "use --parallel.strategy ddp on the CPU, or another torch",
        )

    def divide_sums(group: dist.ProcessGroup, *rest: Any, **options: Any) -> tuple[Any, ...]:
        found = known(group, *rest, **options)
        operations = (dist.ReduceOp.SUM,) * (len(found) - 2)  # none up to torch 2.7, then one for each collective
        return (1.0, float(group.size()), *operations)

    setattr(collectives, _DIVISORS, divide_sums)
    log.debug(f"gloo of torch {torch.__version__} cannot average: gradients are summed, then divided")
