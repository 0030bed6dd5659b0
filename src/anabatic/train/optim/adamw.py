"""AdamW (arXiv 1711.05101, algorithm 2) over buckets of parameters. Moments are flat: one tensor for a whole bucket.

Two kernels, chosen by the device table: torch's fused one, and `run_flat_kernel`, for devices without it, where every
launch
counts: about twenty operators for a bucket, however many parameters are in it. `run_flat_kernel` also updates bf16
weights without a copy in fp32; plain rounding would lose such updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anabatic.config.sections.common import Optim
from anabatic.parallel.sharded_tensors import shard_like, to_local

MAX_BUCKET_ELEMENTS = 1 << 24
"""Elements of a bucket at most, unless one parameter has more. While the flat kernel updates one, it needs four times
as many fp32 numbers: 256 MiB."""


@dataclass
class ParameterBucket:
    """Parameters that are updated together, all with or all without weight decay, of one dtype.

    Attributes:
        params: name -> parameter; this rank's part of it has elements.
        exp_avg, exp_avg_sq: flat moments.
        compensation: flat; what rounding took from bf16 weights (Kahan), else None.
        is_body: they belong to a model that has its own head, which may learn faster.
    """

    params: dict[str, Tensor]
    weight_decay: float
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compensation: Tensor | None = None
    is_body: bool = False

    def local_params(self) -> list[Tensor]:
        """Return this rank's shards, in order."""
        return [to_local(param.detach()) for param in self.params.values()]

    def view_per_param(self, flat: Tensor) -> list[Tensor]:
        """Return a flat tensor of this bucket as one view for each parameter."""
        parts = self.local_params()
        pieces = flat.split([part.numel() for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    def take_grads(self) -> Tensor:
        """Return the gradients as one flat fp32 tensor; the parameters' own are dropped."""
        pieces = []
        for param, part in zip(self.params.values(), self.local_params(), strict=True):
            grad = param.grad
            pieces.append(part.new_zeros(part.numel()) if grad is None else to_local(grad).reshape(-1))
            param.grad = None
        return torch.cat(pieces).float()


def build_buckets(
    params: dict[str, Tensor], config: Optim, device: torch.device, body: bool = False
) -> list[ParameterBucket]:
    """Sort parameters into buckets; matrices decay, vectors do not. `device`: where the state lies."""
    found: list[ParameterBucket] = []
    for decays in (True, False):
        for dtype in dict.fromkeys(param.dtype for param in params.values()):
            same = {
                name: param
                for name, param in params.items()
                if (param.dim() >= 2) == decays and param.dtype == dtype and to_local(param).numel()
            }
            for names in _split_by_size(same):
                size = sum(to_local(same[name]).numel() for name in names)
                zeros = [torch.zeros(size, dtype=dtype, device=device) for _ in range(3)]
                lost = zeros[2] if config.weights == "bf16_kahan" else None
                decay = config.weight_decay if decays else 0.0
                found.append(
                    ParameterBucket({name: same[name] for name in names}, decay, zeros[0], zeros[1], lost, body)
                )
    return found


def _split_by_size(params: dict[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, param in params.items():
        if names and size + to_local(param).numel() > MAX_BUCKET_ELEMENTS:
            yield names
            names, size = [], 0
        names.append(name)
        size += to_local(param).numel()
    if names:
        yield names


def run_fused_kernel(
    bucket: ParameterBucket, count: Tensor, lr: float, config: Optim, factor: Tensor, found_inf: Tensor | None = None
) -> None:
    """torch's fused kernel, which multiplies the gradients by `factor` too. With `found_inf` = 1 nothing changes."""
    grads = [_local_grad(param) for param in bucket.params.values()]
    torch._fused_adamw_(
        bucket.local_params(),
        grads,
        bucket.view_per_param(bucket.exp_avg),
        bucket.view_per_param(bucket.exp_avg_sq),
        [],
        [count] * len(grads),
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=bucket.weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=1 / factor,
        found_inf=found_inf,
    )


def _local_grad(param: Tensor) -> Tensor:
    return torch.zeros_like(to_local(param)) if param.grad is None else to_local(param.grad)


class FlatStep(NamedTuple):
    """Scalars of one step on the device, equal for all buckets.

    Attributes:
        factor: what the gradients are multiplied by first.
        ok: 0 leaves parameters and moments as they are, whatever the gradients hold; 1 updates.
        is_refused: `ok == 0`.
        weights: by which the moments move.
        corrections: of their bias, `1 - beta ** times`.
    """

    factor: Tensor
    ok: Tensor
    is_refused: Tensor
    weights: tuple[Tensor, Tensor]
    corrections: tuple[Tensor, Tensor]


def make_flat_step(count: Tensor, config: Optim, factor: Tensor, ok: Tensor) -> FlatStep:
    """Compute what `run_flat_kernel` needs of a step; `count`: updates so far, this one included if it is made."""
    times = count.clamp(min=1)  # a first update that is refused must not divide by 0
    weights = (1 - config.beta1) * ok, (1 - config.beta2) * ok
    return FlatStep(factor, ok, ok == 0, weights, (1 - config.beta1**times, 1 - config.beta2**times))


def run_flat_kernel(
    bucket: ParameterBucket, step: FlatStep, lr: float, config: Optim, most: int = MAX_BUCKET_ELEMENTS
) -> None:
    """Update flat tensors in the same way; the gradients of the parameters are dropped.

    A matrix larger than a bucket, as embeddings are, is updated slice by slice: what the kernel needs beside it stays
    bounded.

    Args:
        most: elements of a slice.
    """
    parts = [part.view(-1) for part in bucket.local_params()]
    (param, *others) = bucket.params.values()
    if others or len(parts[0]) <= most or param.grad is None:
        whole = _FlatSlice(parts, bucket.exp_avg, bucket.exp_avg_sq, bucket.compensation, bucket.weight_decay)
        _update_slice(whole, bucket.take_grads(), step, lr, config)
        return
    grad = to_local(param.grad).view(-1)
    for start in range(0, len(grad), most):
        piece = slice(start, start + most)
        lost = None if bucket.compensation is None else bucket.compensation[piece]
        one = _FlatSlice([parts[0][piece]], bucket.exp_avg[piece], bucket.exp_avg_sq[piece], lost, bucket.weight_decay)
        _update_slice(one, grad[piece].to(torch.float32, copy=True), step, lr, config)
    param.grad = None


class _FlatSlice(NamedTuple):
    """Flat parameters, or a slice of one, with their flat moments."""

    params: list[Tensor]
    exp_avg: Tensor
    exp_avg_sq: Tensor
    compensation: Tensor | None
    weight_decay: float

    def split_by_param(self, flat: Tensor) -> list[Tensor]:
        return list(flat.split([len(part) for part in self.params]))


def _update_slice(own: _FlatSlice, grad: Tensor, step: FlatStep, lr: float, config: Optim) -> None:
    """`grad`: flat fp32, used up."""
    ok = step.ok
    grad.mul_(step.factor).masked_fill_(step.is_refused, 0.0)
    first = _lerp_moment(own.exp_avg, grad, step.weights[0])
    second = _lerp_moment(own.exp_avg_sq, grad.square_(), step.weights[1])
    root = torch.div(second, step.corrections[1], out=grad).sqrt_().add_(config.eps)  # whose square is used up
    change = torch.div(first, root, out=root).mul_(ok * lr / step.corrections[0])
    if own.exp_avg.dtype == torch.float32:
        if own.weight_decay:
            change.add_(torch.cat(own.params).mul_(ok * (lr * own.weight_decay)))
        torch._foreach_sub_(own.params, own.split_by_param(change))
        return
    before = torch.cat(own.params).float()
    change.neg_().sub_(before * (ok * (lr * own.weight_decay)))
    if own.compensation is None:
        after = round_stochastically(before + change)
    else:  # Kahan's summation: what rounding takes now is added the next time
        change.add_(own.compensation)
        after = (before + change).to(own.exp_avg.dtype)
        own.compensation.copy_(change - (after.float() - before))
    torch._foreach_copy_(own.params, own.split_by_param(after))


def _lerp_moment(moment: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """Move a moment towards `value`; return it in fp32.

    One in bf16 is rounded stochastically: beta2 = 0.999 moves it by less than half of its last digit.
    """
    if moment.dtype == torch.float32:
        return moment.lerp_(value, weight)
    wide = moment.float().lerp_(value, weight)
    moment.copy_(round_stochastically(wide))
    return wide


def round_stochastically(wide: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with probabilities that keep the mean (stochastic rounding, arXiv 2010.06192).

    bf16 is the upper half of fp32's bits: random lower halves carry into it in proportion to what is cut off.
    """
    noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device)
    return (wide.view(torch.int32) + noise).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()


def name_moments(found: list[ParameterBucket]) -> dict[str, Tensor]:
    """Return the moments by name for a checkpoint; they share memory, and are sharded like their parameters."""
    tensors: dict[str, Tensor] = {}
    for bucket in found:
        parts = {"exp_avg": bucket.exp_avg, "exp_avg_sq": bucket.exp_avg_sq, "lost": bucket.compensation}
        for kind, whole in parts.items():
            if whole is None:
                continue
            for (name, param), view in zip(bucket.params.items(), bucket.view_per_param(whole), strict=True):
                tensors[f"{name}.{kind}"] = shard_like(view, param)
    return tensors
