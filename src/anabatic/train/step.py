"""One optimizer step: micro-batches, gradient of the mean over all ranks' targets, clipping, update.

Nothing here waits for the device; `TrainStep.drain`, called by the loop where it logs, is the only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anabatic.core import log
from anabatic.core.heart import HEART
from anabatic.data.batch import Batch, Row
from anabatic.device import overflow
from anabatic.device.device import Device
from anabatic.device.transfer import send
from anabatic.models.forward import pack
from anabatic.parallel.gradients import complete
from anabatic.parallel.world import World, all_sum
from anabatic.train.optim import Optimizer
from anabatic.train.verdict import Verdicts

_SILENCE = 10.0
"""Seconds in one step after which it says how far it is."""


@dataclass
class Drained:
    """What happened since the last `drain`, over all ranks. Losses are means in nats per target; `means` are those of
    what the model adds up beside the loss."""

    loss: float
    grad_norm: float
    targets: int
    tokens: int
    skipped: int
    data_wait_s: float
    stop: bool
    means: dict[str, float]


class LossScale:
    """Dynamic loss scale for fp16, kept on the device (torch.amp.GradScaler's rule: x2 after 2000, /2 on overflow)."""

    def __init__(self, device: Device) -> None:
        on = device.dtype == torch.float16
        self.value = torch.full((), 2.0**16 if on else 1.0, device=device.torch)
        self.good = torch.zeros((), device=device.torch)
        self.on = on

    def update(self, ok: Tensor) -> None:
        """Halve after an overflow, double after 2000 steps without one."""
        if not self.on:
            return
        self.good.add_(1).mul_(ok)
        grown = (self.good >= 2000).float()
        self.value.mul_((1 + grown) * (0.5 + 0.5 * ok))
        self.good.mul_(1 - grown)


class TrainStep:
    """How a step is made.

    Args:
        root: `forward.Root`, as data parallelism has wrapped or divided it.
        loss: `loss(model, packed)` returns the summed loss of a batch.
        optimizer: of the same parameters.
        micro_batch_tokens: the nominal size that keeps summed losses small before the true count is known.
        pack: moves a batch to the device, as the model takes it.
        sums: what the model's forward pass adds up beside the loss, on the device, one number for each of `names`.
        partial: parameters whose gradients are parts (`forward.Root`).
    """

    def __init__(
        self,
        root: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Optimizer,
        device: Device,
        world: World,
        micro_batch_tokens: int,
        pack: Callable[[Batch, torch.device], Any] = pack,
        sums: Tensor | None = None,
        names: Sequence[str] = (),
        partial: frozenset[str] = frozenset(),
    ) -> None:
        self.root, self.loss, self.optimizer = root, loss, optimizer
        self.device, self.world = device, world
        self.nominal = float(micro_batch_tokens)
        self.scale = LossScale(device)
        self.register = overflow.register(device) if self.scale.on else None
        self.pack, self.names, self.partial = pack, names, partial
        self.sums = torch.zeros(0, device=device.torch) if sums is None else sums
        # loss sum, targets, tokens, skipped steps, wish to stop, sums: one tensor, so one collective and one read.
        options: dict[str, Any] = {
            "dtype": torch.float64 if device.type == "cpu" else torch.float32, "device": device.torch,
        }  # fmt: skip
        self.totals = torch.zeros(5 + len(names), **options)
        self.counted = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, *(0.0 for _ in names)], **options)
        """What a refused update still adds to the totals."""
        self.norm = torch.zeros((), device=device.torch)
        self.verdicts = Verdicts(optimizer.config.spike, device.torch)
        self.rows: list[Row] = []
        """What the last step has read."""
        self.wait = 0.0
        self.stop_signal = 0

    def run(self, batches: Iterator[Batch | None], micro_steps: int, lr_scale: float) -> Batch | None:
        """Make one optimizer step from `micro_steps` batches; return the last batch.

        Return None when a signal came in the middle: nothing of the step is kept, so a long one need not be waited
        for. Only a process that is alone may do so; several agree where they log.
        """
        with torch.profiler.record_function("anabatic.step"):  # where profilers and `anabatic sim` see a step
            return self._run(batches, micro_steps, lr_scale)

    def _run(self, batches: Iterator[Batch | None], micro_steps: int, lr_scale: float) -> Batch | None:
        if self.register is not None:
            self.register.clear()
        loss = torch.zeros((), device=self.device.torch)
        targets = tokens = 0
        rows: list[Row] = []
        told = time.perf_counter()
        for index in range(micro_steps):
            if self.stop_signal and self.world.size == 1 and index:
                self.optimizer.zero_grad()
                return None
            start = time.perf_counter()
            if start - told > _SILENCE:
                log.info(f"  in a step: micro-batch {index} of {micro_steps}")
                told = start
            found = next(batches)
            if found is None:  # a signal came while the batch was made
                self.optimizer.zero_grad()
                return None
            batch = found
            HEART.beat()
            self.wait += time.perf_counter() - start
            loss += self._micro(batch, last=index == micro_steps - 1)
            targets += batch.num_targets
            tokens += batch.num_tokens
            rows += batch.rows
        complete(self.optimizer.params, self.partial, not self.optimizer.sharded, self.world)
        self.rows = rows
        self.verdicts.note(self.optimizer.number + 1, rows, batch.state)
        self._update(loss, targets, tokens, lr_scale)
        return batch

    def _micro(self, batch: Batch, last: bool) -> Tensor:
        packed = self.pack(batch, self.device.torch)
        later = isinstance(self.root, DistributedDataParallel) and not last
        with self.root.no_sync() if later else nullcontext():  # type: ignore[operator]
            with self.device.autocast():
                loss: Tensor = self.root(self.loss, packed)
            (loss * (self.scale.value / self.nominal)).backward()
        return loss.detach()

    @torch.no_grad()
    def _update(self, loss: Tensor, targets: int, tokens: int, lr_scale: float) -> None:
        row = torch.tensor([0.0, targets, tokens, 0.0, float(self.stop_signal > 0)], dtype=self.totals.dtype)
        row = send(row, self.device.torch)
        row[0] = loss
        if self.names:
            row = torch.cat((row, self.sums.to(row.dtype)))
            self.sums.zero_()
        if self.world.tensor.rank:  # it has seen the same data as its neighbour
            row[:3], row[5:] = 0.0, 0.0
        row[3] = self._squares()
        here = torch.isfinite(row[0])
        row, whole = self._agreed(row)
        # Data parallelism averaged over the ranks; the mean wanted is over all ranks' targets.
        factor = (self.nominal * self.world.data.size / self.scale.value / row[1].clamp(min=1)).float()
        norm = (row[3].sqrt() * factor).float()
        mean = row[0] / row[1].clamp(min=1)
        finite, ok = self.verdicts.judge(self.optimizer.number + 1, mean, norm, self.scale.on, here, whole)
        clip = self.optimizer.config.max_grad_norm
        if clip:
            factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step(lr_scale, factor, ok)
        self.scale.update(finite)
        self.optimizer.zero_grad()
        self.norm = norm
        row[3] = 1 - ok
        self.totals += torch.where(ok.bool(), row, row.nan_to_num() * self.counted)

    def _agreed(self, row: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum `row` over all ranks; also say, on chips whose numbers cannot, that nothing has overflowed on any."""
        if self.register is None:
            all_sum(row, self.world)
            return row, None
        row = torch.cat((row, self.register.read()[None].to(row.dtype)))
        all_sum(row, self.world)
        return row[:-1], row[-1] == 0

    def _squares(self) -> Tensor:
        """This rank's share of the sum of all squared gradients: of its parts, or of what other ranks have too."""
        parts, shared = map(self._sum_of_squares, self.optimizer.collect())
        squares = parts + shared / self.world.tensor.size
        return squares if self.optimizer.sharded else squares / self.world.data.size

    def _sum_of_squares(self, grads: list[Tensor]) -> Tensor:
        if not grads:  # all rows of every matrix lie on other ranks
            return torch.zeros((), device=self.device.torch)
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        return norms.square_().sum().to(self.device.torch)

    @property
    def stops_at_once(self) -> bool:
        """True when a wish to stop is known to all ranks after every step."""
        return self.world.size == 1 or self.device.type == "cpu"

    def stops(self) -> bool:
        """True when this is known, and some rank wishes to stop."""
        if self.world.size == 1:
            return self.stop_signal > 0
        return self.stops_at_once and bool(self.totals[4] > 0)

    def drain(self) -> Drained:
        """Wait for the device and return what happened since the last call."""
        loss, targets, tokens, skipped, stop, *sums = self.totals.tolist()
        result = Drained(
            loss / targets if targets else float("nan"), float(self.norm), int(targets), int(tokens), int(skipped),
            self.wait, stop > 0,
            {name: value / targets if targets else float("nan") for name, value in zip(self.names, sums, strict=True)},
        )  # fmt: skip
        self.totals.zero_()
        self.wait = 0.0
        return result

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint keeps: they share memory, so loading in place fills them.

        The wish to stop is not among them: it must not stop the run that continues.
        """
        state = {"totals": self.totals[:4], "loss_scale": self.scale.value, "good_steps": self.scale.good}
        return {**state, **({"sums": self.totals[5:]} if self.names else {}), **self.verdicts.state()}
