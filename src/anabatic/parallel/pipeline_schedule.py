"""The 1F1B schedule of pipeline parallelism (PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473, 2.2).

Each stage makes `stages - 1 - rank` forward passes ahead, then one forward and one backward pass in turn, so that at
most `stages - rank` micro-batches are in flight on it. A send and a receive that meet travel as one batch: two ranks
that both send first would wait for each other on networks without buffers.

torch.distributed.pipelining is not used: its stages allocate buffers of the first micro-batch's shape, and packed
batches differ in length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.parallel.mesh import RankGroup


class StageWork(Protocol):
    """What one stage computes of a micro-batch."""

    def forward(self, index: int, received: Tensor | None) -> Tensor:
        """Return the states that the next stage reads; of the last stage the scaled loss.

        Args:
            received: of the stage before, requires gradients; None: this is the first stage.
        """


class StageLink:
    """Exchanges states and their gradients with the stages before and after this one.

    Args:
        group: the stages of one copy of the model, in order.
        width: elements of a token's state; dtype: of states and their gradients.
    """

    def __init__(self, group: RankGroup, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.group, self.width, self.dtype, self.device = group, width, dtype, device
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1

    def exchange(
        self,
        to_next: Tensor | None = None,
        to_previous: Tensor | None = None,
        from_previous: int | None = None,
        from_next: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send and receive together; what would leave the pipeline at an end is left out.

        Args:
            to_next: states; to_previous: gradients of the states that came from there.
            from_previous, from_next: tokens of the states or gradients to receive; None: nothing.

        Returns:
            The states of the stage before, and the gradients of the stage after.
        """
        states = grads = None
        operations = []
        if to_previous is not None and not self.is_first:
            operations.append(self._operation(dist.isend, self._checked(to_previous), -1))
        if from_previous is not None and not self.is_first:
            states = torch.empty(from_previous, self.width, dtype=self.dtype, device=self.device)
            operations.append(self._operation(dist.irecv, states, -1))
        if to_next is not None and not self.is_last:
            operations.append(self._operation(dist.isend, self._checked(to_next), 1))
        if from_next is not None and not self.is_last:
            grads = torch.empty(from_next, self.width, dtype=self.dtype, device=self.device)
            operations.append(self._operation(dist.irecv, grads, 1))
        if operations:
            for request in dist.batch_isend_irecv(operations):
                request.wait()
        return states, grads

    def swap_ends(self, value: Tensor) -> Tensor:
        """Return the tensor that the other end of the pipeline has given; only both ends call it."""
        out = torch.empty_like(value)
        step = self.group.size - 1 if self.is_first else 1 - self.group.size
        pair = [self._operation(dist.isend, value, step), self._operation(dist.irecv, out, step)]
        for request in dist.batch_isend_irecv(pair if self.is_first else pair[::-1]):
            request.wait()
        return out

    def _checked(self, value: Tensor) -> Tensor:
        if value.dtype != self.dtype:
            raise TypeError(f"states of {value.dtype} leave a stage, the next one expects {self.dtype}")
        return value.detach().contiguous()

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
    in_flight: deque[tuple[int, Tensor | None, Tensor]] = deque()

    def run_forward(index: int, received: Tensor | None) -> Tensor:
        if received is not None:
            received.requires_grad_(True)
        out = work.forward(index, received)
        in_flight.append((index, received, out))
        return out

    def run_backward(grads: Tensor | None) -> Tensor | None:
        _, received, out = in_flight.popleft()
        if out.requires_grad:  # not if nothing is trained up to here
            out.backward(grads)  # type: ignore[no-untyped-call]
        if received is None:
            return None
        return torch.zeros_like(received) if received.grad is None else received.grad

    for index in range(ahead):
        received, _ = link.exchange(from_previous=tokens[index])
        link.exchange(to_next=run_forward(index, received))
    received = link.exchange(from_previous=tokens[ahead])[0] if ahead < count else None
    for index in range(ahead, count):
        out = run_forward(index, received)
        _, grads = link.exchange(to_next=out, from_next=tokens[in_flight[0][0]])
        back = run_backward(grads)
        later = tokens[index + 1] if index + 1 < count else None
        received, _ = link.exchange(to_previous=back, from_previous=later)
    while in_flight:
        _, grads = link.exchange(from_next=tokens[in_flight[0][0]])
        link.exchange(to_previous=run_backward(grads))
