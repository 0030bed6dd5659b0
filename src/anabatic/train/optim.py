"""Muon for the matrices inside the blocks, AdamW for the rest. State is fp32 and keyed by parameter name.

An update can be refused on the device: with `ok` = 0 every parameter and moment stays as it was, and the host never
waits to find out.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from anabatic.config.shared import Optim
from anabatic.device.device import Device
from anabatic.parallel.world import World, all_gather_rows

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Keller Jordan, Muon, 2024: kellerjordan.github.io/posts/muon)."""


@torch.no_grad()
def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each of `[n, r, c]` matrices near 1, keeping the singular vectors.

    Newton-Schulz iteration of Muon; the result lies within about 0.7 to 1.2, which is all that Muon needs.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return x.transpose(1, 2) if tall else x


def adamw_reference(
    params: list[Tensor], grads: list[Tensor], moments: list[tuple[Tensor, Tensor]], step: Tensor, lr: float | Tensor,
    config: Optim, decay: float, gate: float | Tensor,
) -> None:  # fmt: skip
    """AdamW (arXiv 1711.05101, algorithm 2) in plain torch; `gate` 0 refuses the update, 1 makes it."""
    for param, grad, (first, second) in zip(params, grads, moments, strict=True):
        first.add_((grad - first) * ((1 - config.beta1) * gate))
        second.add_((grad * grad - second) * ((1 - config.beta2) * gate))
        root = (second / (1 - config.beta2**step)).sqrt_().add_(config.eps)
        param.mul_(1 - lr * decay * gate)
        param.sub_(first / (1 - config.beta1**step) / root * (lr * gate))


class Optimizer:
    """The optimizer of one model.

    Args:
        model: parameters that require gradients are trained.
        config: names, decays and betas.
        lr: peak learning rate of AdamW; matrix_lr: of Muon.
        device, world: where, and among how many ranks Muon's work is divided.
    """

    def __init__(
        self, model: nn.Module, config: Optim, lr: float, matrix_lr: float, device: Device, world: World
    ) -> None:
        self.config, self.lr, self.matrix_lr = config, lr, matrix_lr
        self.device, self.world = device, world
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        outside = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        head = model.get_output_embeddings()  # type: ignore[operator]
        outside.add(id(head.weight))
        stacks: dict[tuple[int, ...], list[str]] = defaultdict(list)
        self.adam_names: list[str] = []
        for name, param in self.params.items():
            if config.name == "muon" and param.dim() == 2 and id(param) not in outside:
                stacks[tuple(param.shape)].append(name)
            else:
                self.adam_names.append(name)
        self.stacks = list(stacks.values())
        self.momentum = [
            torch.zeros(len(names), *self.params[names[0]].shape, device=device.torch) for names in self.stacks
        ]
        self.moments = {
            name: (torch.zeros_like(self.params[name]), torch.zeros_like(self.params[name])) for name in self.adam_names
        }
        self.count = torch.zeros((), device=device.torch)

    def grads(self) -> list[Tensor]:
        """The gradients, in a fixed order; a parameter that took no part has none."""
        return [param.grad for param in self.params.values() if param.grad is not None]

    @torch.no_grad()
    def step(self, scale: float, ok: Tensor | None = None) -> None:
        """Update the parameters.

        Args:
            scale: share of the peak learning rates.
            ok: fp32 scalar on the device, 0 to refuse the update; None: do it. With `ok`, gradients must be finite
                (refused ones zero).
        """
        gate = 1.0 if ok is None else ok
        self.count.add_(gate)
        for names, momentum in zip(self.stacks, self.momentum, strict=True):
            self._muon(names, momentum, self.matrix_lr * scale, gate)
        matrices = [name for name in self.adam_names if self.params[name].dim() >= 2]
        vectors = [name for name in self.adam_names if self.params[name].dim() < 2]
        self._adamw(matrices, self.lr * scale, self.config.weight_decay, ok)
        self._adamw(vectors, self.lr * scale, 0.0, ok)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for param in self.params.values():
            param.grad = None

    def _muon(self, names: list[str], momentum: Tensor, lr: float, gate: float | Tensor) -> None:
        grads = torch.stack([_grad(self.params[name]) for name in names])
        mu = self.config.momentum
        momentum.add_((grads - momentum).mul_((1 - mu) * gate))
        update = self._orthogonalised(grads.lerp_(momentum, mu))
        rows, columns = update.shape[1:]
        # Equal root-mean-square updates for every shape (Keller Jordan's rule).
        step = lr * max(1.0, rows / columns) ** 0.5 * gate
        shrink = 1 - lr * self.config.weight_decay * gate
        for name, delta in zip(names, update.mul_(step), strict=True):
            self.params[name].mul_(shrink).sub_(delta)

    def _orthogonalised(self, stack: Tensor) -> Tensor:
        """Each rank takes its share of the matrices; all receive all."""
        half = stack.bfloat16() if self.device.dtype == torch.bfloat16 else stack
        if self.world.size == 1:
            return orthogonalise(half).to(stack.dtype)
        share = -(-len(stack) // self.world.size)
        padded = torch.cat((half, half.new_zeros(share * self.world.size - len(half), *half.shape[1:])))
        mine = padded[self.world.rank * share : (self.world.rank + 1) * share]
        return all_gather_rows(orthogonalise(mine), self.world)[: len(stack)].to(stack.dtype)

    def _adamw(self, names: list[str], lr: float, decay: float, ok: Tensor | None) -> None:
        if not names:
            return
        params = [self.params[name].detach() for name in names]
        grads = [_grad(self.params[name]) for name in names]
        moments = [self.moments[name] for name in names]
        if not self.device.row.fused_adamw:
            adamw_reference(params, grads, moments, self.count, lr, self.config, decay, 1.0 if ok is None else ok)
            return
        first, second = ([moment[i] for moment in moments] for i in (0, 1))
        torch._fused_adamw_(
            params,
            grads,
            first,
            second,
            [],
            [self.count] * len(params),
            lr=lr,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            weight_decay=decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
            found_inf=None if ok is None else 1 - ok,
        )

    def state(self) -> dict[str, Tensor]:
        """The state as named tensors that share memory with the optimizer, so that loading in place fills it."""
        tensors = {"count": self.count}
        for names, momentum in zip(self.stacks, self.momentum, strict=True):
            tensors.update({f"{name}.momentum": part for name, part in zip(names, momentum, strict=True)})
        for name, (first, second) in self.moments.items():
            tensors[f"{name}.exp_avg"] = first
            tensors[f"{name}.exp_avg_sq"] = second
        return tensors


def _grad(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad
