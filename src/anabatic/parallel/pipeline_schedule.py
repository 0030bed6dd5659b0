"""Runs the timetable of a pipeline's stage, and exchanges states and their gradients with other stages.

torch.distributed.pipelining is not used: its stages allocate buffers of the first micro-batch's shape, and packed
batches differ in length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.pipeline_timetable import Action, Transfer, build_timetable


class StageWork(Protocol):
    """What one stage computes of a micro-batch: the link's tensors of one end from those of the other."""

    def forward(self, chunk: int, index: int, received: list[Tensor]) -> list[Tensor]:
        """Return what the next chunk reads, of the last chunk nothing.

        Args:
            chunk: of this stage; index: of the micro-batch.
            received: of the chunk before, of the first chunk nothing.
        """

    def backward(self, chunk: int, index: int, received: list[Tensor]) -> list[Tensor]:
        """Return what the chunk before reads, of the first chunk nothing.

        Args:
            received: of the chunk after, of the last chunk nothing.
        """


class _Pending(NamedTuple):
    transfer: Transfer
    requests: list[dist.Work]
    tensors: list[Tensor]


class StageLink:
    """Exchanges states and their gradients with other stages, each with a row of counts.

    Args:
        group: the stages of one copy of the model, in order.
        width: elements of a token's state; dtype: of states and their gradients.
        counts: fp32 numbers that travel beside them; 0: none do.
    """

    def __init__(self, group: RankGroup, width: int, dtype: torch.dtype, device: torch.device, counts: int = 0) -> None:
        self.group, self.width, self.dtype, self.device, self.counts = group, width, dtype, device, counts
        self.is_first, self.is_last = group.rank == 0, group.rank == group.size - 1

    def start_send(self, values: Sequence[Tensor], target: int) -> tuple[list[dist.Work], list[Tensor]]:
        """Begin to send states, or their gradients, and counts to a stage; return what to wait for and to keep."""
        if values[0].dtype != self.dtype:
            raise TypeError(f"states of {values[0].dtype} leave a stage, the next one expects {self.dtype}")
        values = [value.detach().contiguous() for value in values]
        return self._start(dist.isend, values, target), values

    def start_receive(self, tokens: int, source: int) -> tuple[list[dist.Work], list[Tensor]]:
        """Begin to receive the states of so many tokens, or their gradients, and counts from a stage."""
        values = [torch.empty(tokens, self.width, dtype=self.dtype, device=self.device)]
        if self.counts:
            values.append(torch.empty(self.counts, device=self.device))
        return self._start(dist.irecv, values, source), values

    def swap_ends(self, value: Tensor) -> Tensor:
        """Return the tensor that the other end of the pipeline has given; only both ends call it."""
        out = torch.empty_like(value)
        other = self.group.size - 1 if self.is_first else 0
        pair = [self._operation(dist.isend, value, other), self._operation(dist.irecv, out, other)]
        for request in dist.batch_isend_irecv(pair if self.is_first else pair[::-1]):
            request.wait()
        return out

    def _start(self, kind: object, values: Sequence[Tensor], rank: int) -> list[dist.Work]:
        # As a batch, so that all travel in order over the communicator of the group: others would take more memory.
        found: list[dist.Work] = dist.batch_isend_irecv([self._operation(kind, value, rank) for value in values])
        return found

    def _operation(self, kind: object, value: Tensor, rank: int) -> dist.P2POp:
        group = self.group.process_group or dist.group.WORLD
        assert group is not None
        return dist.P2POp(kind, value, dist.get_global_rank(group, rank), group)  # type: ignore[arg-type]


class _Exchange:
    """The transfers of a step, which are started in the order of the timetable and waited for when they are read.

    Sent tensors are kept until something is read that was started later: by then they have arrived as well.
    """

    def __init__(self, link: StageLink, tokens: Sequence[int]) -> None:
        self._link, self._tokens = link, tokens
        self._results: dict[Action, list[Tensor]] = {}
        self._arrived: dict[Transfer, list[Tensor]] = {}
        self._pending: deque[_Pending] = deque()

    def start_transfers(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers of this stage."""
        link = self._link
        for transfer in transfers:
            if transfer.source == link.group.rank:
                started = link.start_send(self._results.pop(transfer.action), transfer.target)
            else:
                started = link.start_receive(self._tokens[transfer.action.micro_batch], transfer.source)
            self._pending.append(_Pending(transfer, *started))

    def keep_result(self, action: Action, result: list[Tensor]) -> None:
        """Keep the result of an action until its transfer is started; empty: it has none."""
        if result:
            self._results[action] = result

    def take_received(self, transfer: Transfer | None) -> list[Tensor]:
        """Wait for a transfer and return what has come; nothing for None."""
        if transfer is None:
            return []
        while transfer not in self._arrived:
            self._wait_for_first()
        return self._arrived.pop(transfer)

    def wait_for_all(self) -> None:
        """Wait for all transfers."""
        while self._pending:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        transfer, requests, tensors = self._pending.popleft()
        for request in requests:
            request.wait()
        if transfer.target == self._link.group.rank:
            self._arrived[transfer] = tensors


def run_forward_backward(work: StageWork, tokens: Sequence[int], link: StageLink, chunks: int = 1) -> None:
    """Run the forward and backward passes of all micro-batches on this stage; gradients add up in the parameters.

    Args:
        tokens: of each micro-batch, the same on every stage.
        chunks: of each stage.
    """
    timetable = build_timetable(link.group.size, chunks, len(tokens))[link.group.rank]
    exchange = _Exchange(link, tokens)
    for transfers, action, needs in timetable.steps:
        exchange.start_transfers(transfers)
        run = work.backward if action.is_backward else work.forward
        result = run(action.chunk, action.micro_batch, exchange.take_received(needs))
        exchange.keep_result(action, result)
    exchange.start_transfers(timetable.transfers)
    exchange.wait_for_all()
