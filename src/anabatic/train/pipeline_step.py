"""The micro-batches of a step on one stage of a pipeline, and held-out batches on all stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabatic.device.device import Device
from anabatic.models.forward import PackedBatch, cast_adapters, compute_hidden_states, score_targets
from anabatic.models.pipeline.stages import find_tied_name, is_tied_across_stages
from anabatic.parallel.pipeline_schedule import StageLink, run_forward_backward
from anabatic.parallel.process_groups import World, is_sharded_by_fsdp, to_local


def open_link(model: Any, device: Device, world: World) -> StageLink:
    """Return the link of this stage to those beside it.

    The stream of states has the dtype of the embedding, sharded weights that of the products (`sharding.py`).
    """
    is_cast = any(is_sharded_by_fsdp(param) for param in model.parameters())
    dtype = device.dtype if is_cast else model.get_input_embeddings().weight.dtype
    return StageLink(world.pipeline_group, model.config.hidden_size, dtype, device.torch_device)


def _compute_states(model: Any, packed: PackedBatch, received: Tensor | None) -> Tensor:
    if torch.is_grad_enabled():
        cast_adapters(model)
    # FSDP2 (torch 2.13, _fsdp_state.py) warns of views: an operation in place on one would lose its hook.
    return compute_hidden_states(model, packed, received).clone()


class StageStep:
    """Runs this rank's stage of a step.

    Args:
        root: `forward.Root` of the stage; loss: `loss(model, packed, received=states)`, on the last stage.

    Attributes:
        loss: sum of the losses of the last step on the last stage, zero on others.
    """

    def __init__(self, root: nn.Module, loss: Callable[..., Tensor], device: Device, world: World) -> None:
        self.root, self.loss_fn, self.device = root, loss, device
        model: Any = root.model
        self.model = model
        self.link = open_link(model, device, world)
        self.tied = find_tied_name(model) if is_tied_across_stages(model) else ""
        self.loss = torch.zeros((), device=device.torch_device)
        self._batches: Sequence[PackedBatch] = ()
        self._scale = torch.ones((), device=device.torch_device)

    @property
    def uncounted(self) -> frozenset[str]:
        """Parameters whose gradients the first stage counts."""
        return frozenset((self.tied,)) if self.tied and self.link.is_last else frozenset()

    def run_batches(self, batches: Sequence[PackedBatch], scale: Tensor) -> Tensor:
        """Run forward and backward passes of a step's micro-batches; return the summed loss, zero but on the last.

        Args:
            scale: what the loss is multiplied by before its backward pass.
        """
        self._batches, self._scale = batches, scale
        self.loss = torch.zeros((), device=self.device.torch_device)
        run_forward_backward(self, [packed.input_ids.shape[1] for packed in batches], self.link)
        self._batches = ()
        return self.loss

    def forward(self, index: int, received: Tensor | None) -> Tensor:
        """See `pipeline_schedule.StageWork`."""
        call = self.loss_fn if self.link.is_last else _compute_states
        with self.device.autocast():
            out: Tensor = self.root(functools.partial(call, received=received), self._batches[index])
        if self.link.is_last:
            self.loss += out.detach()
            return out * self._scale
        return out

    @torch.no_grad()
    def add_tied_gradients(self) -> None:
        """Add the gradients of the embedding and of the head, which are one matrix on two stages."""
        if not self.tied or not (self.link.is_first or self.link.is_last):
            return
        weight = self.model.get_input_embeddings().weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        own = to_local(weight.grad)
        own += self.link.swap_ends(own.contiguous())


def score_batch(root: nn.Module, packed: PackedBatch, device: Device, link: StageLink) -> tuple[Tensor, Tensor]:
    """Return losses and hits of the targets of a batch as `score_targets` does; none but on the last stage."""
    received, _ = link.exchange(from_previous=packed.input_ids.shape[1])
    with device.autocast():
        if link.is_last:
            call = functools.partial(score_targets, chunk_bytes=device.device_row.chunk_bytes, received=received)
            scored: tuple[Tensor, Tensor] = root(call, packed)
            return scored
        states = root(_compute_states, packed, received)
    link.exchange(to_next=states)
    nothing = torch.zeros(0, device=device.torch_device)
    return nothing, nothing
