"""The 1F1B schedule of pipeline parallelism (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, 2.2).

Each stage makes `stages - 1 - rank` forward passes ahead, then one forward and one backward pass in turn, so that at
most `stages - rank` micro-batches are in flight on it. A send and a receive that meet travel as one batch: two ranks
that both send first would wait for each other on networks without buffers.

torch.distributed.pipelining is not used: its stages allocate buffers of the first micro-batch's shape, and packed
batches differ in length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.parallel.mesh import RankGroup


class StageWork(Protocol):
    """What one stage computes of a micro-batch: the link's tensors of one end from those of the other."""

    def forward(self, index: int, received: list[Tensor]) -> list[Tensor]:
        """Return what the next stage reads, of the last stage nothing.

        Args:
            received: of the stage before, of the first stage nothing.
        """

    def backward(self, index: int, received: list[Tensor]) -> list[Tensor]:
        """Return what the stage before reads, of the first stage nothing.

        Args:
            received: of the stage after, of the last stage nothing.
        """


class StageLink:
    """Exchanges states and their gradients with the stages before and after this one, each with a row of counts.

    Args:
        group: the stages of one copy of the model, in order.
        width: elements of a token's state; dtype: of states and their gradients.
        counts: fp32 numbers that travel beside them; 0: none do.
    """

    def __init__(self, group: RankGroup, width: int, dtype: torch.dtype, device: torch.device, counts: int = 0) -> None:
        self.group, self.width, self.dtype, self.device, self.counts = group, width, dtype, device, counts
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1

    def exchange(
        self,
        to_next: Sequence[Tensor] = (),
        to_previous: Sequence[Tensor] = (),
        from_previous: int | None = None,
        from_next: int | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Send and receive together; what would leave the pipeline at an end is left out.

        Args:
            to_next: states and counts; to_previous: gradients of the states that came from there, and counts.
            from_previous, from_next: tokens of the states or gradients to receive; None: nothing.

        Returns:
            What came from the stage before and from the stage after; nothing at an end.
        """
        operations: list[dist.P2POp] = []

        def send(values: Sequence[Tensor], step: int) -> None:
            operations.extend(self._operation(dist.isend, value, step) for value in self._checked(values))

        def receive(tokens: int | None, step: int) -> list[Tensor]:
            values = [] if tokens is None else self._make_buffers(tokens)
            operations.extend(self._operation(dist.irecv, value, step) for value in values)
            return values

        states: list[Tensor] = []
        grads: list[Tensor] = []
        if not self.is_first:
            send(to_previous, -1)
            states = receive(from_previous, -1)
        if not self.is_last:
            send(to_next, 1)
            grads = receive(from_next, 1)
        if operations:
            for request in dist.batch_isend_irecv(operations):
                request.wait()
        return states, grads

    def _make_buffers(self, tokens: int) -> list[Tensor]:
        states = torch.empty(tokens, self.width, dtype=self.dtype, device=self.device)
        return [states, *([torch.empty(self.counts, device=self.device)] if self.counts else [])]

    def swap_ends(self, value: Tensor) -> Tensor:
        """Return the tensor that the other end of the pipeline has given; only both ends call it."""
        out = torch.empty_like(value)
        step = self.group.size - 1 if self.is_first else 1 - self.group.size
        pair = [self._operation(dist.isend, value, step), self._operation(dist.irecv, out, step)]
        for request in dist.batch_isend_irecv(pair if self.is_first else pair[::-1]):
            request.wait()
        return out

    def _checked(self, values: Sequence[Tensor]) -> list[Tensor]:
        if values and values[0].dtype != self.dtype:
            raise TypeError(f"states of {values[0].dtype} leave a stage, the next one expects {self.dtype}")
        return [value.detach().contiguous() for value in values]

    def _operation(self, kind: object, value: Tensor, step: int) -> dist.P2POp:
        group = self.group.process_group or dist.group.WORLD
        assert group is not None
        return dist.P2POp(kind, value, dist.get_global_rank(group, self.group.rank + step), group)  # type: ignore[arg-type]


def run_forward_backward(work: StageWork, tokens: Sequence[int], link: StageLink) -> None:
    """Run the forward and backward passes of all micro-batches on this stage; gradients add up in the parameters.

    Args:
        tokens: of each micro-batch, the same on every stage.
    """
    count = len(tokens)
    ahead = min(link.group.size - 1 - link.group.rank, count)
    for index in range(ahead):
        received, _ = link.exchange(from_previous=tokens[index])
        link.exchange(to_next=work.forward(index, received))
    received = link.exchange(from_previous=tokens[ahead])[0] if ahead < count else []
    for index in range(ahead, count):
        first = index - ahead  # of those in flight
        _, grads = link.exchange(to_next=work.forward(index, received), from_next=tokens[first])
        later = tokens[index + 1] if index + 1 < count else None
        received, _ = link.exchange(to_previous=work.backward(first, grads), from_previous=later)
    for index in range(count - ahead, count):
        _, grads = link.exchange(from_next=tokens[index])
        link.exchange(to_previous=work.backward(index, grads))
