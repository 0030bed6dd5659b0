"""Muon for the matrices inside the blocks, AdamW for the rest, and the learning-rate schedule. State is keyed by
parameter name.

An update can be refused on the device: with `ok` = 0 every parameter and moment stays as it was, and the host never
waits to find out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anabatic.config.sections.common import Optim, Schedule
from anabatic.device.device import Device
from anabatic.parallel.collectives import all_gather_rows
from anabatic.parallel.sharded_tensors import (
    gather_full_stack,
    get_local_slices,
    is_sharded_along,
    is_sharded_by_fsdp,
    shard_like,
    to_local,
)
from anabatic.parallel.world import World
from anabatic.train.optim import adamw

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Keller Jordan, Muon, 2024: kellerjordan.github.io/posts/muon)."""


@torch.no_grad()
def orthogonalize_matrices(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each of `[n, r, c]` matrices near 1, keeping the singular vectors.

    Newton-Schulz iteration of Muon; the result lies within about 0.7 to 1.2, which is all that Muon needs.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.transpose(1, 2) if tall else x


@dataclass
class MatrixStack:
    """Matrices of one shape, divided alike, orthogonalised together.

    Attributes:
        params: name -> parameter.
        momentum: fp32 `[n, rows, columns]`, of this rank.
        grads: the same shape, between `collect_grads` and the update.
    """

    params: dict[str, Tensor]
    momentum: Tensor
    grads: Tensor | None = None

    def collect_grads(self) -> Tensor:
        """Take the gradients into one tensor; the parameters' own are dropped."""
        found = []
        for param in self.params.values():
            part = to_local(param)
            found.append(torch.zeros_like(part) if param.grad is None else to_local(param.grad))
            param.grad = None
        self.grads = torch.stack(found)
        return self.grads


@dataclass(frozen=True)
class HeadRates:
    """Learning rates of a model with its own head.

    Attributes:
        head_prefix: prefix of the names of its parameters; AdamW updates them at the full rate. Empty: there is none.
        body_scale: share of the rates that the other parameters learn at.
        frozen_steps: steps, from the first on, in which those do not move; their moments are gathered meanwhile.
    """

    head_prefix: str = ""
    body_scale: float = 1.0
    frozen_steps: int = 0

    def body_scale_at(self, step: int) -> float:
        """Return the share at a step, from 1."""
        return self.body_scale if step > self.frozen_steps else 0.0


@dataclass(frozen=True)
class LearningRates:
    """Peak learning rates.

    Attributes:
        adamw: of AdamW; matrix: of Muon.
        head: of a model with its own head.
    """

    adamw: float
    matrix: float
    head: HeadRates = HeadRates()


def _shard_position(param: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the rows and columns of this rank's shard, as a sort key."""
    return tuple((part.start, part.stop) for part in get_local_slices(param))


def _separate_gradients(params: Iterable[Tensor]) -> None:
    """Copy gradients that are a small part of a tensor out of it: those of a block may be one
    (`models/weight_casts.py`), which its norms would keep whole beside the copies that stacks of matrices take."""
    inside: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for param in params:
        grad = param.grad
        # Shards of FSDP2 are parts of what was reduced for a module; those are not touched.
        if type(grad) is Tensor and 8 * grad.nbytes < grad.untyped_storage().nbytes():
            inside[grad.dtype].append((param, grad))
    for pairs in inside.values():
        flat = torch.cat([grad.reshape(-1) for _, grad in pairs])
        for (param, grad), own in zip(pairs, flat.split([grad.numel() for _, grad in pairs]), strict=True):
            param.grad = own.view(grad.shape)


class Optimizer:
    """The optimizer of one model.

    Args:
        model: parameters that require gradients are trained; each rank updates the parts that it holds.
        config: names, decays and betas.
        device, world: where, and among how many ranks Muon's work is divided.
        home: where parameters and state lie; default: on the device.
        experts: names of parameters that ranks of an expert group divide.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Optim,
        rates: LearningRates,
        device: Device,
        world: World,
        home: torch.device | None = None,
        experts: frozenset[str] = frozenset(),
    ) -> None:
        self.config, self.rates = config, rates
        self.device, self.world = device, world
        self.state_device = home or device.torch_device
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.experts = experts
        self.uncounted: frozenset[str] = frozenset()
        """Parameters whose gradients count for the norm on another rank, which has them too."""
        self.muon_group = world.gradient_group if world.pipeline_group.size > 1 else world
        """Ranks with the same matrices, which divide Muon's work."""
        self.is_sharded = any(is_sharded_by_fsdp(param, name in experts) for name, param in self.params.items())
        outside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        head = model.get_output_embeddings()  # type: ignore[operator]
        outside.add(id(head.weight))
        shapes: dict[tuple[Any, ...], dict[str, Tensor]] = defaultdict(dict)
        rest: dict[str, Tensor] = {}
        on_top: dict[str, Tensor] = {}
        for name, param in self.params.items():
            if rates.head.head_prefix and name.startswith(rates.head.head_prefix):
                on_top[name] = param
            elif config.name == "muon" and param.dim() == 2 and id(param) not in outside:
                shapes[tuple(param.shape), _shard_position(param)][name] = param
            else:
                rest[name] = param
        self.stacks = [
            MatrixStack(
                same, torch.zeros(len(same), *to_local(next(iter(same.values()))).shape, device=self.state_device)
            )
            for same in shapes.values()
        ]
        self.buckets = adamw.build_buckets(rest, config, self.state_device, body=True) + adamw.build_buckets(
            on_top, config, self.state_device
        )
        self.update_count = torch.zeros((), device=self.state_device)
        self.step_number = 0
        """Steps, refused ones included; whoever continues a run sets it."""
        # On the host torch's fused kernel is there whatever the device; bf16 weights need the flat one's rounding.
        self.is_fused = (device.device_row.fused_adamw or self.state_device.type == "cpu") and config.weights == "fp32"

    def collect_grads(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return this rank's gradients: of what it has alone among its tensor ranks, of what all of those have, and of
        divided experts.

        Called once before `step`, which uses what lies here then.
        """
        parts: list[Tensor] = []
        shared: list[Tensor] = []
        experts: list[Tensor] = []
        if self.stacks:
            _separate_gradients([param for bucket in self.buckets for param in bucket.params.values()])
        for stack in self.stacks:
            apart = is_sharded_along(next(iter(stack.params.values())), "tensor")
            (parts if apart else shared).append(stack.collect_grads())
        for name, param in (item for bucket in self.buckets for item in bucket.params.items()):
            if param.grad is not None and name not in self.uncounted:
                owner = experts if name in self.experts else parts if is_sharded_along(param, "tensor") else shared
                owner.append(to_local(param.grad))
        return parts, shared, experts

    @torch.no_grad()
    def step(self, scale: float, factor: Tensor, ok: Tensor) -> None:
        """Update the parameters, after `collect_grads`.

        Args:
            scale: share of the peak learning rates.
            factor: fp32 scalar that the gradients are multiplied by.
            ok: fp32 scalar, 0 to refuse the update whatever the gradients hold, 1 to make it.
        """
        self.step_number += 1
        if self.state_device.type == "cpu":  # reading costs little there, and refusing outright is cheaper
            factor, ok = factor.to(self.state_device), ok.to(self.state_device)
            if not ok:
                return
        self.update_count.add_(ok)
        body = self.rates.head.body_scale_at(self.step_number)
        for stack in self.stacks:
            self._update_muon(stack, self.rates.matrix * scale * body, factor, ok)
        flat = None if self.is_fused else adamw.make_flat_step(self.update_count, self.config, factor, ok)
        for bucket in self.buckets:
            lr = self.rates.adamw * scale * (body if bucket.is_body else 1.0)
            if flat is None:
                adamw.run_fused_kernel(
                    bucket,
                    self.update_count,
                    lr,
                    self.config,
                    factor,
                    None if self.state_device.type == "cpu" else 1 - ok,
                )
            else:
                adamw.run_flat_kernel(bucket, flat, lr, self.config)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for param in self.params.values():
            param.grad = None
        for stack in self.stacks:
            stack.grads = None

    def _update_muon(self, stack: MatrixStack, lr: float, factor: Tensor, ok: Tensor) -> None:
        assert stack.grads is not None
        grads = stack.grads.mul_(factor).masked_fill_(ok == 0, 0.0)
        stack.grads = None
        mu = self.config.momentum
        stack.momentum.lerp_(grads, (1 - mu) * ok)
        update = self._orthogonalize_stack(grads.lerp_(stack.momentum, mu), stack)
        rows, columns = next(iter(stack.params.values())).shape
        # Equal root-mean-square updates for every shape (Keller Jordan's rule).
        step = lr * max(1.0, rows / columns) ** 0.5 * ok
        shrink = 1 - lr * self.config.weight_decay * ok
        parts = [to_local(param.detach()) for param in stack.params.values()]
        torch._foreach_mul_(parts, shrink)
        torch._foreach_sub_(parts, list(update.mul_(step).unbind()))

    def _orthogonalize_stack(self, mine: Tensor, stack: MatrixStack) -> Tensor:
        """Each rank takes its share of the matrices; all receive all, or their rows of all.

        Args:
            mine: `[n, rows, columns]` of this rank.
        """
        half = mine.bfloat16() if self.device.dtype == torch.bfloat16 else mine
        if self.world.size == 1:
            return orthogonalize_matrices(half).to(mine.dtype)
        size, rank = self.muon_group.size, self.muon_group.rank
        like = next(iter(stack.params.values()))
        whole = gather_full_stack(half, like).to(self.device.torch_device)
        share = -(-len(whole) // size)
        padded = torch.cat((whole, whole.new_zeros(share * size - len(whole), *whole.shape[1:])))
        done = all_gather_rows(orthogonalize_matrices(padded[rank * share : (rank + 1) * share]), self.muon_group)[
            : len(whole)
        ]
        own = (slice(None), *get_local_slices(like))
        return done[own].to(mine.device, mine.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as named tensors that share the optimizer's memory, so that loading in place restores it."""
        tensors = {"count": self.update_count}
        for stack in self.stacks:
            for (name, param), part in zip(stack.params.items(), stack.momentum, strict=True):
                tensors[f"{name}.momentum"] = shard_like(part, param)
        return tensors | adamw.name_moments(self.buckets)


def compute_lr_scale(step: int, total: int, schedule: Schedule) -> float:
    """Return the share of the peak learning rate at `step` (1 to `total`).

    Linear warm-up, a plateau, then the fall (WSD, arXiv 2404.06395); the last step has `final_lr_ratio`.
    """
    warmup = round(schedule.warmup_ratio * total)
    if step <= warmup:
        return step / warmup
    fall = round(schedule.decay_ratio * total)
    into = step - (total - fall)
    if schedule.decay == "none" or fall == 0 or into <= 0:
        return 1.0
    done = into / fall
    left = 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.final_lr_ratio + (1.0 - schedule.final_lr_ratio) * left
