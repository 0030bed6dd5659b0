"""Tensor parallelism: linear layers sharded over ranks (Megatron-LM, arXiv 1909.08053, section 3).

Two layers in a row, the first sharded by its outputs ("column-wise" in the paper, whose weights are transposed), the
second by its inputs ("row-wise"), need one all-reduce forward and one backward: `copy_to_parallel_region` (the paper's
f) before the first, `reduce_from_parallel_region` (its g) after the second. Activations in between belong to one rank:
some attention heads, some inner neurons.

Weights are DTensors, so that code that reads, saves or updates them knows their slices; products use the plain local
shards.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anabatic.parallel.collectives import all_reduce_sum
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharded_tensors import to_local

SHARD_OUTPUTS, SHARD_INPUTS = 0, 1
"""Sharded dimension of a linear layer's weight `[out, in]`."""


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
        # A copy: selective recomputation keeps the product, which an in-place sum would overwrite.
        return all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def copy_to_parallel_region(x: Tensor, group: RankGroup) -> Tensor:
    """Return `x`, equal on all ranks; its gradient is summed over the ranks, each of which uses it for its part."""
    out: Tensor = _CopyToRegion.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_from_parallel_region(x: Tensor, group: RankGroup) -> Tensor:
    """Return the sum of the ranks' `x`; the gradient of the sum is the gradient of each `x`."""
    out: Tensor = _ReduceFromRegion.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class ShardedLinear(nn.Linear):
    """A linear layer sharded by its outputs, or by its inputs with summed outputs.

    Attributes:
        input_group: ranks that shard the inputs and sum their outputs; None: outputs are sharded.
    """

    input_group: RankGroup | None = None

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`, one of them sharded."""
        out = F.linear(input, to_local(self.weight), get_local_bias(self.bias, self.input_group))
        return out if self.input_group is None else reduce_from_parallel_region(out, self.input_group)


def get_local_bias(bias: Tensor | None, input_group: RankGroup | None) -> Tensor | None:
    """Return the part of a bias that this rank adds; if outputs are summed, only one rank adds it."""
    if bias is None or (input_group is not None and input_group.rank > 0):
        return None
    return to_local(bias)


def shard_parameter(owner: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    """Shard parameter `name` of `owner` along `dim`; it may be on the meta device."""
    parameter = owner._parameters[name]
    if parameter is not None:
        from torch.distributed.tensor import Shard, distribute_tensor

        part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)])
        owner._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
