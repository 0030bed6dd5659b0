"""Tensor parallelism: linear layers of which each rank computes a part (Megatron-LM, arXiv 1909.08053, section 3).

Two layers in a row, the first divided by its outputs ("column-wise" in the paper, whose weights lie transposed), the
second by its inputs ("row-wise"), need one sum forward and one backward: `copy_to_parallel_region` (the paper's f)
before the first, `reduce_from_parallel_region` (its g) after the second. What lies between is this rank's alone: some
attention heads, some inner neurons.

Weights are DTensors, so that whatever reads, saves or updates them knows which part of the whole it has; products are
made of the plain local parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from anabatic.parallel.dtensors import to_local
from anabatic.parallel.process_groups import RankGroup, all_reduce_sum

SHARD_OUTPUTS, SHARD_INPUTS = 0, 1
"""What of a linear layer's weight `[out, in]` is divided."""


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
        # A copy: selective recomputation keeps the product, and would find the sum in its place.
        return all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def copy_to_parallel_region(x: Tensor, group: RankGroup) -> Tensor:
    """Return `x`, which every rank has; its gradient is summed over the ranks, each of which used it for its part."""
    out: Tensor = _CopyToRegion.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_from_parallel_region(x: Tensor, group: RankGroup) -> Tensor:
    """Return the sum of the ranks' `x`; the gradient of the sum is that of each."""
    out: Tensor = _ReduceFromRegion.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class ShardedLinear(nn.Linear):
    """A linear layer of which this rank computes some outputs, or the share that some inputs have in all outputs.

    Attributes:
        input_group: the ranks among which the inputs are divided, which then add their outputs up; None: outputs are.
    """

    input_group: RankGroup | None = None

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`, of which one is a part."""
        out = F.linear(input, to_local(self.weight), get_local_bias(self.bias, self.input_group))
        return out if self.input_group is None else reduce_from_parallel_region(out, self.input_group)


def get_local_bias(bias: Tensor | None, by_inputs: RankGroup | None) -> Tensor | None:
    """Return what of a bias this rank adds: of outputs that are summed, one rank alone."""
    if bias is None or (by_inputs is not None and by_inputs.rank > 0):
        return None
    return to_local(bias)


def shard_parameter(owner: nn.Module, name: str, dim: int, mesh: DeviceMesh) -> None:
    """Make parameter `name` of `owner` a part along `dim`; it may be on the meta device."""
    parameter = owner._parameters[name]
    if parameter is not None:
        part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)])
        owner._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
