"""Low-rank adapters (LoRA, arXiv 2106.09685) inside a model's linear layers.

A layer computes `x W^T + s (x A^T) B^T` with W frozen, `A [r, in]`, `B [out, r]` and `s = alpha / r`. Besides the
input, which the layer below keeps anyway, the forward pass saves only `x A^T` (`[T, r]`): three matrix products
forward, five backward, and no product of the size of W.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from anabatic.models.quantized import QuantizedWeight
from anabatic.parallel.collectives import all_reduce_sum
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharded_tensors import copy_from_full, gather_full_tensor, to_local
from anabatic.parallel.tensor_linear import get_local_bias, reduce_from_parallel_region


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return `total + scale * a b`, in place unless selective recomputation, which keeps `total`, is active."""
    if is_in_torch_dispatch_mode():
        return torch.addmm(total, a, b, alpha=scale)
    return total.addmm_(a, b, alpha=scale)


class _LoraFunction(torch.autograd.Function):
    """Shapes: x `[T, in]`, weight `[out, in]`, a `[r, in]`, b `[out, r]`; all of one dtype except a and b, which may be
    wider; their gradients have their dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        down = x @ a.to(x.dtype).t()
        out = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        out = add_product(out, down, b.to(x.dtype).t(), scale)
        ctx.save_for_backward(x, weight, a, b, down)
        ctx.scale, ctx.biased = scale, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, down = ctx.saved_tensors
        (grad,) = grads
        grad = grad.contiguous()
        d_down = grad @ b.to(grad.dtype)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = (grad @ weight).addmm_(d_down, a.to(grad.dtype), alpha=ctx.scale)
        d_bias = grad.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
        d_a = (d_down.t() @ x).mul_(ctx.scale).to(a.dtype)
        d_b = (grad.t() @ down).mul_(ctx.scale).to(b.dtype)
        return d_x, None, d_bias, d_a, d_b, None


class LayerGroup(Protocol):
    """Layers that are computed together."""

    def compute_output(self, layer: LoraLinear, x: Tensor) -> Tensor | None:
        """Return the output of one layer, or None if it must be computed separately."""


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter.

    Args:
        base: the layer; its weight and bias are shared, not copied.
        rank, scale: `r` and `s` above.
        dropout: dropout rate of the adapter's inputs in training.
        dora: also train the norm of every row of the sum (DoRA, arXiv 2402.09353, equation 5).
    """

    lora_A_start: Tensor | None
    lora_B_start: Tensor | None
    quantized: QuantizedWeight | None
    group: LayerGroup | None = None
    """Group of layers that are computed together (`grouped.py`)."""
    input_group: RankGroup | None = None
    """Ranks that shard the weight's columns, with tensor parallelism."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float = 0.0, dora: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.dropout = scale, dropout
        self.quantized = None
        options: dict[str, Any] = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, **options))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, **options))
        self.register_buffer("lora_A_start", None)
        self.register_buffer("lora_B_start", None)
        self.lora_magnitude: nn.Parameter | None = None
        if dora:
            self.lora_magnitude = nn.Parameter(torch.empty(self.out_features, **options))

    @torch.no_grad()
    def init_adapter(self, generator: torch.Generator) -> None:
        """Draw A as PEFT does (uniform, Kaiming with a = sqrt 5), B zero: the layer starts as the frozen one."""
        bound = 1 / math.sqrt(self.in_features)
        copy_from_full(self.lora_A, torch.empty(self.lora_A.shape).uniform_(-bound, bound, generator=generator))
        to_local(self.lora_B).zero_()
        if self.lora_magnitude is not None:  # sharded like the weight's rows
            to_local(self.lora_magnitude).copy_(self._row_norms(to_local(self.weight).float()))

    @torch.no_grad()
    def init_pissa(self) -> None:
        """PiSSA (arXiv 2404.02948, section 3): start with the largest singular vectors, and freeze the rest.

        The initial adapter is kept, so that the difference to the original weight can be saved as a plain adapter.
        """
        weight = gather_full_tensor(self.weight).float()
        u, singular_values, v = torch.linalg.svd(weight, full_matrices=False)
        rank = self.lora_A.shape[0]
        root_values = (singular_values[:rank] / self.scale).sqrt()
        # A matrix with fewer rows or columns than the rank, such as a gate of one output, has fewer singular values.
        unused = rank - len(root_values)
        self.lora_A_start = F.pad(root_values[:, None] * v[:rank], (0, 0, 0, unused))
        self.lora_B_start = F.pad(u[:, :rank] * root_values, (0, unused))
        copy_from_full(self.lora_A, self.lora_A_start)
        copy_from_full(self.lora_B, self.lora_B_start)
        copy_from_full(self.weight, weight - self.compute_initial_product())

    def compute_initial_product(self) -> Tensor:
        """Return the product that `init_pissa` subtracted from the weight, `[out, in]`."""
        assert self.lora_A_start is not None and self.lora_B_start is not None
        return self.scale * self.lora_B_start @ self.lora_A_start

    def gather_delta(self) -> tuple[Tensor, Tensor]:
        """Return full A and B for the *original* weight, of twice the rank after `init_pissa`. All ranks call it."""
        a, b = gather_full_tensor(self.lora_A), gather_full_tensor(self.lora_B)
        if self.lora_A_start is None or self.lora_B_start is None:
            return a, b
        return torch.cat((a, self.lora_A_start)), torch.cat((b, -self.lora_B_start), dim=1)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        if self.group is not None and (grouped_output := self.group.compute_output(self, input)) is not None:
            return grouped_output
        x = input.to(self.get_compute_dtype(input.device.type))
        out = self._forward_adapted(x) if self.quantized is None else self._forward_quantized(x, self.quantized)
        return out if self.input_group is None else reduce_from_parallel_region(out, self.input_group)

    def _forward_adapted(self, x: Tensor) -> Tensor:
        weight = to_local(self.weight).to(x.dtype)
        bias: Tensor | None = self.bias
        if bias is not None:
            bias = to_local(bias) if self.input_group is None else get_local_bias(bias, self.input_group)
        bias = None if bias is None else bias.to(x.dtype)
        if self.lora_magnitude is not None:
            return self._forward_dora(x, weight, bias)
        if self.dropout and self.training:
            dropped = F.dropout(x, self.dropout)
            return (
                F.linear(x, weight, bias) + F.linear(F.linear(dropped, self._cast_a(x)), self._cast_b(x)) * self.scale
            )
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _LoraFunction.apply(  # type: ignore[no-untyped-call]
                x.flatten(0, -2), weight, bias, to_local(self.lora_A), to_local(self.lora_B), self.scale
            )
        return out.unflatten(0, x.shape[:-1])

    def _forward_quantized(self, x: Tensor, quantized: QuantizedWeight) -> Tensor:
        dropped = F.dropout(x, self.dropout) if self.dropout and self.training else x
        with torch.autocast(x.device.type, enabled=False):
            out = quantized.apply_linear(x, None if self.bias is None else self.bias.to(x.dtype))
            return out + F.linear(F.linear(dropped, self._cast_a(x)), self._cast_b(x)) * self.scale

    def _forward_dora(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute DoRA; the norm is a constant in the backward pass (section 4.3 of the paper)."""
        assert self.lora_magnitude is not None
        with torch.no_grad():
            delta = self.scale * to_local(self.lora_B) @ to_local(self.lora_A)
            row_norms = self._row_norms(to_local(self.weight).float() + delta)
        dropped = F.dropout(x, self.dropout) if self.dropout and self.training else x
        delta = F.linear(F.linear(dropped, self._cast_a(x)), self._cast_b(x)) * self.scale
        ratio = (to_local(self.lora_magnitude) / row_norms).to(x.dtype)
        if dropped is x:
            out = (F.linear(x, weight) + delta) * ratio
        else:
            out = F.linear(x, weight) + (ratio - 1) * F.linear(dropped, weight) + delta * ratio
        return out if bias is None else out + bias

    def _row_norms(self, weight: Tensor) -> Tensor:
        """Return the norm of every row, also if the columns are sharded."""
        if self.input_group is None:
            return torch.linalg.vector_norm(weight, dim=1)
        return all_reduce_sum(weight.square().sum(1), self.input_group).sqrt()

    def _cast_a(self, x: Tensor) -> Tensor:
        return to_local(self.lora_A).to(x.dtype)

    def _cast_b(self, x: Tensor) -> Tensor:
        return to_local(self.lora_B).to(x.dtype)

    def get_compute_dtype(self, device_type: str) -> torch.dtype:
        """Return the dtype of autocast for matrix products, which it does not apply inside an autograd function."""
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
        return self.weight.dtype

    def extra_repr(self) -> str:
        """Return the description for printing."""
        return f"{super().extra_repr()}, rank={self.lora_A.shape[0]}, scale={self.scale:g}"

    @torch.no_grad()
    def compute_merged_weight(self) -> Tensor:
        """Return the merged weight in the frozen weight's dtype."""
        total = self.weight.float() + self.scale * self.lora_B @ self.lora_A
        if self.lora_magnitude is not None:
            total *= (self.lora_magnitude / torch.linalg.vector_norm(total, dim=1))[:, None]
        return total.to(self.weight.dtype)
