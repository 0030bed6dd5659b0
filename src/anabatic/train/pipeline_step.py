"""The micro-batches of a step on one stage of a pipeline, and held-out batches on all stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabatic.device.device import Device
from anabatic.models.experts.routing import RouterSums, RoutingRecorder
from anabatic.models.forward import PackedBatch, cast_adapters, compute_hidden_states, score_targets
from anabatic.models.pipeline.stages import find_tied_name, is_tied_across_stages, use_chunk
from anabatic.parallel.pipeline_schedule import StageLink, run_forward_backward
from anabatic.parallel.sharded_tensors import is_sharded_by_fsdp, to_local
from anabatic.parallel.world import World


def open_link(model: Any, device: Device, world: World, counts: int = 0) -> StageLink:
    """Return the link of this stage to others; `counts` as in `StageLink`.

    The stream of states has the dtype of the embedding, sharded weights that of the products (`sharding.py`).
    """
    is_cast = any(is_sharded_by_fsdp(param) for param in model.parameters())
    dtype = device.dtype if is_cast else model.get_input_embeddings().weight.dtype
    return StageLink(world.pipeline_group, model.config.hidden_size, dtype, device.torch_device, counts)


def _compute_states(model: Any, packed: PackedBatch, received: Tensor | None) -> Tensor:
    if torch.is_grad_enabled():
        cast_adapters(model)
    # FSDP2 (torch 2.13, _fsdp_state.py) warns of views: an operation in place on one would lose its hook.
    return compute_hidden_states(model, packed, received).clone()


class _InFlight(NamedTuple):
    """A micro-batch between its forward and its backward pass in a chunk of this stage.

    Attributes:
        received: states of the chunk before, which require gradients; None: this is the first.
        out: states for the next chunk, of the last one the scaled loss.
        routers: of the layers here and before; None: no router has a loss.
    """

    received: Tensor | None
    out: Tensor
    routers: RouterSums | None


class StageStep:
    """Runs this rank's stage of a step (`pipeline_schedule.StageWork`).

    A router loss is of all layers together, `sum_e counts_e probability_e` (`experts/routing.py`). So the choices of
    every expert add up from chunk to chunk, and return with the gradients as those of all layers; each chunk then goes
    back through the share of its own probabilities.

    Args:
        root: `forward.Root` of the stage; loss: `loss(model, packed, received=states)`, on the last stage.
        routing: what is recorded of the model's routers; None: it has none.

    Attributes:
        loss: sum of the losses of the last step on the last stage, zero on others.
    """

    def __init__(
        self,
        root: nn.Module,
        loss: Callable[..., Tensor],
        device: Device,
        world: World,
        routing: RoutingRecorder | None = None,
    ) -> None:
        self.root, self.loss_fn, self.device = root, loss, device
        model: Any = root.model
        self.model = model
        self.routing = routing if routing is not None and routing.coefficient else None
        counts = self.routing.count_size if self.routing is not None else 0
        self.link, self.chunks = open_link(model, device, world, counts), world.pipeline_chunks
        self.tied = find_tied_name(model) if is_tied_across_stages(model) else ""
        self.loss = torch.zeros((), device=device.torch_device)
        self._batches: Sequence[PackedBatch] = ()
        self._targets: Sequence[int] = ()
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._scale = torch.ones((), device=device.torch_device)

    @property
    def uncounted(self) -> frozenset[str]:
        """Parameters whose gradients the first stage counts."""
        return frozenset((self.tied,)) if self.tied and self.link.is_last else frozenset()

    def run_batches(self, batches: Sequence[PackedBatch], targets: Sequence[int], scale: Tensor) -> Tensor:
        """Run forward and backward passes of a step's micro-batches; return the summed loss, zero but on the last.

        Args:
            targets: of each micro-batch.
            scale: what the loss is multiplied by before its backward pass.
        """
        self._batches, self._targets, self._scale = batches, targets, scale
        self.loss = torch.zeros((), device=self.device.torch_device)
        run_forward_backward(self, [packed.input_ids.shape[1] for packed in batches], self.link, self.chunks)
        self._batches = ()
        return self.loss

    def forward(self, chunk: int, index: int, received: list[Tensor]) -> list[Tensor]:
        """See `StageWork`; the loss of the last chunk is added up here."""
        states = received[0].requires_grad_(True) if received else None
        is_last = self.link.is_last and chunk == self.chunks - 1
        call = self.loss_fn if is_last else _compute_states
        with self.device.autocast(), use_chunk(self.model, chunk):
            out: Tensor = self.root(functools.partial(call, received=states), self._batches[index])
            routers = None if self.routing is None else self._sum_routers(self.routing, received)
        if is_last:
            self.loss += out.detach()
            self._in_flight[chunk, index] = _InFlight(states, out * self._scale, routers)
            return []
        self._in_flight[chunk, index] = _InFlight(states, out, routers)
        return [out] if routers is None else [out, routers.counts]

    def _sum_routers(self, routing: RoutingRecorder, received: list[Tensor]) -> RouterSums:
        """Return the choices of the layers here and before, and the probabilities of those here."""
        own = routing.take_sums()
        earlier = received[1] if received else torch.zeros(self.link.counts, device=self.device.torch_device)
        if own is None:  # all layers here are dense
            return RouterSums(earlier, earlier.new_zeros(len(earlier) - 1))
        return RouterSums(own.counts + earlier, own.probability)

    def backward(self, chunk: int, index: int, received: list[Tensor]) -> list[Tensor]:
        """See `StageWork`."""
        states, out, routers = self._in_flight.pop((chunk, index))
        outs, grads = [out], [received[0] if received else None]
        counts = []
        if self.routing is not None and routers is not None:
            counts = received[1:] or [routers.counts]
            with self.device.autocast():
                balance = self.routing.compute_loss(counts[0], routers.probability, self._targets[index])
            outs.append(balance * self._scale)
            grads.append(None)
        trained = [number for number, tensor in enumerate(outs) if tensor.requires_grad]
        if trained:  # not if nothing is trained up to here
            torch.autograd.backward([outs[number] for number in trained], [grads[number] for number in trained])
        if states is None:
            return []
        return [torch.zeros_like(states) if states.grad is None else states.grad, *counts]

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


def score_batch(
    root: nn.Module, packed: PackedBatch, device: Device, link: StageLink, chunks: int
) -> tuple[Tensor, Tensor]:
    """Return losses and hits of the targets of a batch as `score_targets` does; none but on the last stage.

    Args:
        chunks: of each stage.
    """
    rank, size = link.group.rank, link.group.size
    model: Any = root.model
    scored = torch.zeros(0, device=device.torch_device), torch.zeros(0, device=device.torch_device)
    for chunk in range(chunks):
        states: Tensor | None = None
        if not link.is_first or chunk:
            states = _wait_for_tensors(link.start_receive(packed.input_ids.shape[1], (rank - 1) % size))[0]
        is_last = link.is_last and chunk == chunks - 1
        with device.autocast(), use_chunk(model, chunk):
            if is_last:
                call = functools.partial(score_targets, chunk_bytes=device.device_row.chunk_bytes, received=states)
                scored = root(call, packed)
                break
            out: Tensor = root(_compute_states, packed, states)
        _wait_for_tensors(link.start_send([out], (rank + 1) % size))
    return scored


def _wait_for_tensors(started: tuple[list[dist.Work], list[Tensor]]) -> list[Tensor]:
    """Wait for a transfer and return its tensors."""
    for request in started[0]:
        request.wait()
    return started[1]
