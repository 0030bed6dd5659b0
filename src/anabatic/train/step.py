"""One optimizer step: gradient accumulation over micro-batches, mean over all ranks' targets, clipping, update.

Nothing here waits for the device; `TrainStep.read_stats`, called by the loop where it logs, is the only read.
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
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.data.batching.packing import Batch, SegmentOrigin
from anabatic.device import ops_npu
from anabatic.device.device import Device, send_to_device
from anabatic.models.experts.routing import RoutingRecorder
from anabatic.models.forward import pack_batch
from anabatic.parallel.collectives import all_reduce_sum
from anabatic.parallel.gradient_reduction import (
    reduce_expert_gradients,
    reduce_stage_gradients,
    reduce_tensor_gradients,
)
from anabatic.train.guards.spike_detector import SpikeDetector
from anabatic.train.metrics.rank_times import StepTimer
from anabatic.train.optim.optimizer import Optimizer
from anabatic.train.pipeline_step import StageStep

_REPORT_AFTER_SECONDS = 10.0
"""Seconds in one step after which it says how far it is."""


@dataclass
class StepStats:
    """What happened since the last `drain`, over all ranks. Losses are means in nats per target; `means` are those of
    what the model adds up beside the loss."""

    loss: float
    grad_norm: float
    targets: int
    tokens: int
    skipped: int
    data_wait_s: float
    should_stop: bool
    means: dict[str, float]


class LossScale:
    """Dynamic loss scale for fp16, kept on the device (torch.amp.GradScaler's rule: x2 after 2000, /2 on overflow)."""

    def __init__(self, device: Device) -> None:
        on = device.dtype == torch.float16
        self.value = torch.full((), 2.0**16 if on else 1.0, device=device.torch_device)
        self.good_steps = torch.zeros((), device=device.torch_device)
        self.is_enabled = on

    def update(self, ok: Tensor) -> None:
        """Halve after an overflow, double after 2000 steps without one."""
        if not self.is_enabled:
            return
        self.good_steps.add_(1).mul_(ok)
        grown = (self.good_steps >= 2000).float()
        self.value.mul_((1 + grown) * (0.5 + 0.5 * ok))
        self.good_steps.mul_(1 - grown)


class TrainStep:
    """How a step is made.

    Args:
        root: a `ModelRoot`, as data parallelism has wrapped or divided it.
        loss: `loss(model, packed)` returns the summed loss of a batch.
        optimizer: of the same parameters, with the device and the processes.
        micro_batch_tokens: the nominal size that keeps summed losses small before the true count is known.
        pack: moves a batch to the device, as the model takes it.
        sums: what the model's forward pass adds up beside the loss, on the device, one number for each of
        `names`.
        routing: what is recorded of the model's routers; None: it has none.
    """

    def __init__(
        self,
        root: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        optimizer: Optimizer,
        micro_batch_tokens: int,
        pack: Callable[[Batch, torch.device], Any] = pack_batch,
        sums: Tensor | None = None,
        names: Sequence[str] = (),
        routing: RoutingRecorder | None = None,
    ) -> None:
        self.root, self.loss_fn, self.optimizer = root, loss, optimizer
        device, world = self.device, self.world = optimizer.device, optimizer.world
        self.expected_tokens = float(micro_batch_tokens)
        self.loss_scale = LossScale(device)
        self.overflow_register = ops_npu.open_register(device) if self.loss_scale.is_enabled else None
        self.pack_batch, self.metric_names = pack, names
        whole: Any = getattr(root, "module", root)  # DDP wraps a `ModelRoot`
        self.partial_params: frozenset[str] = whole.partial_params
        """Parameters whose gradients are parts."""
        self.routing = routing
        self.sums = [part for part in (sums, None if routing is None else routing.sums) if part is not None]
        # loss sum, targets, tokens, skipped steps, wish to stop, sums: one tensor, so one collective and one read.
        options: dict[str, Any] = {
            "dtype": torch.float64 if device.type == "cpu" else torch.float32,
            "device": device.torch_device,
        }
        self.totals = torch.zeros(5 + sum(map(len, self.sums)), **options)
        self.refused_mask = torch.zeros_like(self.totals)
        self.refused_mask[2:5] = 1.0
        """What a refused update still adds to the totals."""
        self.grad_norm = torch.zeros((), device=device.torch_device)
        self.spike_detector = SpikeDetector(optimizer.config.spike, device.torch_device)
        self.stage = StageStep(root, loss, device, world, routing) if world.pipeline_group.size > 1 else None
        if self.stage is not None:
            optimizer.uncounted = self.stage.uncounted
        # Stages wait for each other in every micro-batch: their times do not tell which one is slow.
        self.timer = StepTimer(device) if world.size > 1 and self.stage is None else None
        self.last_rows: list[SegmentOrigin] = []
        """What the last step has read."""
        self.data_wait = 0.0
        self.stop_signal = 0
        self._is_refusing = False

    def run_step(self, batches: Iterator[Batch | None], micro_steps: int, lr_scale: float) -> Batch | None:
        """Make one optimizer step from `micro_steps` batches; return the last batch.

        Return None when a signal came in the middle: nothing of the step is kept, so a long one need not be waited
        for. Only a process that is alone may do so; several agree where they log.
        """
        with torch.profiler.record_function("anabatic.step"):  # where profilers and `anabatic sim` see a step
            return self._run_micro_batches(batches, micro_steps, lr_scale)

    def probe_step(self, batches: Iterator[Batch | None], micro_steps: int) -> None:
        """Make a step whose update is refused: its memory and time are a step's, weights and moments stay."""
        window, number = self.spike_detector.window.clone(), self.optimizer.step_number
        self._is_refusing = True
        try:
            self.run_step(batches, micro_steps, 0.0)
        finally:
            self._is_refusing = False
        self.spike_detector.window.copy_(window)
        self.spike_detector.clear_records()
        self.totals.zero_()
        self.optimizer.step_number, self.data_wait = number, 0.0

    def _run_micro_batches(self, batches: Iterator[Batch | None], micro_steps: int, lr_scale: float) -> Batch | None:
        if self.overflow_register is not None:
            self.overflow_register.clear_flag()
        loss = torch.zeros((), device=self.device.torch_device)
        targets = tokens = 0
        rows: list[SegmentOrigin] = []
        read: list[Batch] = []
        last_log_time = time.perf_counter()
        for index in range(micro_steps):
            if self.stop_signal and self.world.size == 1 and index:
                self.optimizer.zero_grad()
                return None
            start = time.perf_counter()
            if start - last_log_time > _REPORT_AFTER_SECONDS:
                log.info(f"  in a step: micro-batch {index} of {micro_steps}")
                last_log_time = start
            found = next(batches)
            if found is None:  # a signal came while the batch was made
                self.optimizer.zero_grad()
                return None
            batch = found
            if HEARTBEAT.is_open:
                HEARTBEAT.record_beat()
            self.data_wait += time.perf_counter() - start
            if self.stage is None:
                loss += self._run_micro_batch(batch, last=index == micro_steps - 1)
            else:
                read.append(batch)
            targets += batch.num_targets
            tokens += batch.num_tokens
            rows += batch.segment_origins
        if self.stage is not None:
            loss = self._run_stage(self.stage, read)
        if self.world.size > 1:
            reduce_expert_gradients(self.optimizer.params, self.optimizer.experts, self.world)
            is_averaged = self.optimizer.is_sharded or self.stage is not None
            reduce_tensor_gradients(self.optimizer.params, self.partial_params, not is_averaged, self.world)
        if self.timer is not None:
            self.timer.finish_step()
        self.last_rows = rows
        self.spike_detector.record_step(self.optimizer.step_number + 1, rows, batch.loader_state)
        self._update_weights(loss, targets, tokens, lr_scale)
        return batch

    def _run_stage(self, stage: StageStep, batches: Sequence[Batch]) -> Tensor:
        """Run all micro-batches of a step on this stage; gradients are then those of one device."""
        packed = [self.pack_batch(batch, self.device.torch_device) for batch in batches]
        targets = [batch.num_targets for batch in batches]
        loss = stage.run_batches(packed, targets, self.loss_scale.value / self.expected_tokens)
        stage.add_tied_gradients()
        if not self.optimizer.is_sharded:
            reduce_stage_gradients(self.optimizer.params, self.optimizer.experts, self.world)
        return loss

    def _run_micro_batch(self, batch: Batch, last: bool) -> Tensor:
        timer = self.timer if last else None
        if timer is not None:
            timer.start_micro_batch()
        packed = self.pack_batch(batch, self.device.torch_device)
        later = isinstance(self.root, DistributedDataParallel) and not last
        with self.root.no_sync() if later else nullcontext():  # type: ignore[operator]
            with self.device.autocast():
                loss: Tensor = self.root(self.loss_fn, packed)
                balance = None if self.routing is None else self.routing.take_loss(batch.num_targets)
            scaled = (loss if balance is None else loss + balance) * (self.loss_scale.value / self.expected_tokens)
            if timer is not None:
                timer.watch_backward(scaled)
            scaled.backward()
        return loss.detach()

    @torch.no_grad()
    def _update_weights(self, loss: Tensor, targets: int, tokens: int, lr_scale: float) -> None:
        row = torch.tensor([0.0, targets, tokens, 0.0, float(self.stop_signal > 0)], dtype=self.totals.dtype)
        row = send_to_device(row, self.device.torch_device)
        row[0] = loss
        if self.sums:
            row = torch.cat((row, *(part.to(row.dtype) for part in self.sums)))
            torch._foreach_zero_(self.sums)
        if self.world.tensor_group.rank:  # it has seen the same data as its neighbour
            row[:3], row[5:] = 0.0, 0.0
        if not self.world.is_last_stage:  # other layers record their sums
            row[:3] = 0.0
        if self.world.context_group.rank:  # the same batch, but other tokens of it
            row[1:3] = 0.0
        row[3] = self._grad_squares()
        is_finite_here = torch.isfinite(row[0])
        row, no_overflow = self._reduce_over_ranks(row)
        # Gradients were averaged over the ranks; the mean wanted is over all ranks' targets.
        factor = (
            self.expected_tokens * self.world.gradient_group.size / self.loss_scale.value / row[1].clamp(min=1)
        ).float()
        norm = (row[3].sqrt() * factor).float()
        mean = row[0] / row[1].clamp(min=1)
        finite, ok = self.spike_detector.judge_step(
            self.optimizer.step_number + 1, mean, norm, self.loss_scale.is_enabled, is_finite_here, no_overflow
        )
        if self._is_refusing:
            finite, ok = torch.ones_like(finite), torch.zeros_like(ok)
        clip = self.optimizer.config.max_grad_norm
        if clip:
            factor = factor * (clip / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step(lr_scale, factor, ok)
        if not self._is_refusing:
            self.loss_scale.update(finite)
        self.optimizer.zero_grad()
        self.grad_norm = norm
        row[3] = 1 - ok
        self.totals += torch.where(ok.bool(), row, row.nan_to_num() * self.refused_mask)

    def _reduce_over_ranks(self, row: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sum `row` over all ranks; also say, on chips whose numbers cannot, that nothing has overflowed on any."""
        if self.overflow_register is None:
            all_reduce_sum(row, self.world)
            return row, None
        row = torch.cat((row, self.overflow_register.read_flag()[None].to(row.dtype)))
        all_reduce_sum(row, self.world)
        return row[:-1], row[-1] == 0

    def _grad_squares(self) -> Tensor:
        """Return this rank's share of the sum of squared gradients: of its own shards, or of replicated gradients."""
        parts, shared, experts = self.optimizer.collect_grads()
        squares = self._sum_of_squares(shared)
        if self.world.tensor_group.size > 1:
            squares = self._sum_of_squares(parts) + squares / self.world.tensor_group.size
        copies = self.world.shape.replicate if self.optimizer.is_sharded else self.world.gradient_group.size
        squares = squares if copies == 1 else squares / copies
        if experts:
            copies = self.world.shape.replicate if self.optimizer.is_sharded else self.world.expert_copies.size
            squares = squares + self._sum_of_squares(experts) / copies
        return squares

    def _sum_of_squares(self, grads: list[Tensor]) -> Tensor:
        if not grads:  # all rows of every matrix lie on other ranks
            return torch.zeros((), device=self.device.torch_device)
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        return norms.square_().sum().to(self.device.torch_device)

    @property
    def can_stop_at_once(self) -> bool:
        """True when a wish to stop is known to all ranks after every step."""
        return self.world.size == 1 or self.device.type == "cpu"

    def should_stop(self) -> bool:
        """Return whether some rank wants to stop, as far as this rank knows."""
        if self.world.size == 1:
            return self.stop_signal > 0
        return self.can_stop_at_once and bool(self.totals[4] > 0)

    def read_stats(self) -> StepStats:
        """Wait for the device and return what happened since the last call."""
        loss, targets, tokens, skipped, stop, *sums = self.totals.tolist()
        named = len(self.metric_names)
        result = StepStats(
            loss / targets if targets else float("nan"),
            float(self.grad_norm),
            int(targets),
            int(tokens),
            int(skipped),
            self.data_wait,
            stop > 0,
            {
                name: value / targets if targets else float("nan")
                for name, value in zip(self.metric_names, sums[:named], strict=True)
            }
            | ({} if self.routing is None else self.routing.describe_sums(sums[named:], int(targets))),
        )
        self.totals.zero_()
        self.data_wait = 0.0
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint keeps: they share memory, so loading in place fills them.

        The wish to stop is not among them: it must not stop the run that continues.
        """
        state = {
            "totals": self.totals[:4],
            "loss_scale": self.loss_scale.value,
            "good_steps": self.loss_scale.good_steps,
        }
        return {**state, **({"sums": self.totals[5:]} if self.sums else {}), **self.spike_detector.state_dict()}
