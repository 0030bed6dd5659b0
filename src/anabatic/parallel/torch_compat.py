"""Workarounds for FSDP2 over gloo on CPUs in releases of torch before the pinned one.

Collectives of accelerators support averages.
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
    """Make FSDP2 average gradients on the CPU; every rank of `mesh` calls this before sharding a model.

    Raises:
        Failure: gradients would be sums instead of averages, and this torch cannot be patched.
    """
    if not _can_average(mesh.get_group()):
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
