"""The loop: when to log, save, evaluate and stop. How a step is made is in `step.py`."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from anabatic.config.shared import Evaluate, Log, Save, Schedule
from anabatic.core import log
from anabatic.core.errors import Failure
from anabatic.core.heart import HEART
from anabatic.core.paths import RunFolder
from anabatic.core.text import duration
from anabatic.data.batch import Batch
from anabatic.device.device import Device
from anabatic.monitor.window import Window
from anabatic.parallel.world import World
from anabatic.train import checkpoint
from anabatic.train.best import Best
from anabatic.train.metrics import Metrics
from anabatic.train.schedule import lr_scale
from anabatic.train.step import Drained, TrainStep
from anabatic.train.watch import share

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_HOPELESS = 50
"""Skipped updates in a row of logged windows after which the job gives up."""


@dataclass
class Progress(Best):
    """Host numbers that a checkpoint keeps; `evaluated` is the last step whose held-out loss they know."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    evaluated: int = 0
    last_loss: float | None = None
    loader: dict[str, Any] = field(default_factory=dict)


@dataclass
class Fit:
    """What the loop needs.

    Attributes:
        tensors: returns all that a checkpoint holds: model, optimizer, step counters. Asked for at every save: FSDP2
            gives uneven and offloaded parts new memory in the first forward pass.
        describe: what a logged row also says, from the loader's state.
        evaluate: held-out metrics after a step, `{}` when there is nothing to evaluate; every rank calls it.
        keep_best: write best_model; every rank calls it after the best evaluation so far.
        peak_lr, peak_matrix_lr: of AdamW and of Muon, None without it.
        flops_per_token, peak_flops: for the model FLOP utilisation; 0: unknown, not shown.
        watch: what the devices of this machine did meanwhile; None: not known.
    """

    folder: RunFolder
    metrics: Metrics
    device: Device
    world: World
    step: TrainStep
    batches: Iterator[Batch]
    total_steps: int
    micro_steps: int
    schedule: Schedule
    save: Save
    eval: Evaluate
    log: Log
    peak_lr: float
    peak_matrix_lr: float | None
    tensors: Callable[[], dict[str, Tensor]]
    identity: dict[str, Any]
    sizes: dict[str, float]
    evaluate: Callable[[int], dict[str, Any]]
    describe: Callable[[dict[str, Any]], dict[str, Any]]
    keep_best: Callable[[], None]
    flops_per_token: float = 0.0
    peak_flops: float = 0.0
    watch: Window | None = None


def fit(job: Fit, progress: Progress) -> bool:
    """Train until `total_steps` or until `eval.patience` is over; return False when a signal ended the run early
    (everything is saved then).

    Raises:
        Failure: no finite loss for a long time, or nothing can be saved.
    """
    clock = _Clock(job, progress)
    saved = progress.step
    HEART.beat(progress.step)
    with _signals(job.step):
        if progress.evaluated < progress.step and _evaluates(job, progress.step):
            _evaluate(job, progress, clock)  # a checkpoint is written before the evaluation of its step
        while progress.step < job.total_steps and not progress.enough(job.eval):
            scale = lr_scale(progress.step + 1, job.total_steps, job.schedule)
            batch = job.step.run(job.batches, job.micro_steps, scale)
            if batch is None:
                progress.seconds = clock.seconds()
                return _stop(job, progress, saved)
            progress.step += 1
            HEART.beat(progress.step)
            progress.loader = batch.state
            last = progress.step == job.total_steps
            # One process, or several on a CPU, stop here without writing a row, so that the rows to come are those of a
            # run left alone; devices agree on it where they log, because their queues are not emptied for it.
            stop = not last and job.step.stops()
            if last or progress.step == 1 or progress.step % job.log.every == 0:
                stop = (clock.log(scale) and not last) or stop
            if last or stop or (job.save.every and progress.step % job.save.every == 0):
                progress.seconds = clock.seconds()
                saved = _save(job, progress, saved)
            if stop:
                return _stop(job, progress, saved)
            if _evaluates(job, progress.step):
                _evaluate(job, progress, clock)
            if progress.step == 1:
                clock.pause()  # it takes half a second, which would make the next row's speed and ETA wrong
                gc.collect()
                gc.freeze()  # what exists now lives to the end: do not walk it again at every collection
                clock.go_on()
        if progress.step < job.total_steps:
            _stop_early(job, progress, clock, saved)
    progress.seconds = clock.seconds()
    return True


def _stop_early(job: Fit, progress: Progress, clock: _Clock, saved: int) -> None:
    log.info(
        f"early stopping after step {progress.step}: {progress.stale} evaluations without a better {job.eval.metric};"
        f" the best was after step {progress.best['step']}"
    )
    job.metrics.event("early_stop", step=progress.step, best=progress.best["step"])
    clock.rest()
    progress.seconds = clock.seconds()
    _save(job, progress, saved)


def _stop(job: Fit, progress: Progress, saved: int) -> bool:
    _save(job, progress, saved)
    log.info(f"stopped after step {progress.step}: saved; the same command continues")
    job.metrics.event("stop", step=progress.step)
    return False


def _save(job: Fit, progress: Progress, saved: int) -> int:
    if saved == progress.step:
        return saved
    start = time.perf_counter()
    host = {"progress": vars(progress), "identity": job.identity, "sizes": job.sizes, "world_size": job.world.size}
    path = checkpoint.save(job.folder, progress.step, job.tensors(), host, job.device, job.world)
    if job.world.first:
        checkpoint.prune(job.folder, job.save.keep_last, progress.step)
    seconds = time.perf_counter() - start
    log.info(f"saved {path} in {duration(seconds)}")
    job.metrics.event("checkpoint", step=progress.step, path=str(path), seconds=round(seconds, 3))
    return progress.step


def _evaluates(job: Fit, step: int) -> bool:
    return step == job.total_steps or (job.eval.every > 0 and step % job.eval.every == 0)


def _evaluate(job: Fit, progress: Progress, clock: _Clock) -> None:
    clock.pause()
    row = job.evaluate(progress.step)
    progress.evaluated = progress.step
    clock.go_on()
    if not row:
        return
    job.metrics.evaluate(progress.step, row)
    loss = row["valid_loss"]
    if not math.isfinite(loss):
        raise Failure(
            f"the held-out loss after step {progress.step} is {loss}: an update has destroyed the weights",
            "lower optim.lr and optim.matrix_lr, and start over with --save.resume never",
        )
    if progress.judge(progress.step, row, job.eval):
        job.keep_best()
    clock.go_on()


class _Clock:
    """Turns what the step counted into a row of metrics. Time spent on evaluation does not count as training."""

    def __init__(self, job: Fit, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self.before = progress.seconds
        self.training = self.held = 0.0
        self.mark = time.perf_counter()
        self.marked_step = progress.step
        self.barren = 0

    def seconds(self) -> float:
        return self.before + self.training + self.held + time.perf_counter() - self.mark

    def pause(self) -> None:
        """Keep what has passed since the last row."""
        self.held += time.perf_counter() - self.mark
        if self.job.watch is not None:
            self.job.watch.hold(True)

    def go_on(self) -> None:
        """Count again from now on."""
        self.mark = time.perf_counter()
        if self.job.watch is not None:
            self.job.watch.hold(False)

    def rest(self) -> None:
        """Write the row of the steps since the last one, if there are any."""
        if self.progress.step > self.marked_step:
            self.log(lr_scale(self.progress.step, self.job.total_steps, self.job.schedule))

    def log(self, scale: float) -> bool:
        """Write one row; return True when some rank wishes to stop."""
        job, progress = self.job, self.progress
        drained = job.step.drain()
        now = time.perf_counter()
        span, self.mark, self.held = max(self.held + now - self.mark, 1e-9), now, 0.0
        self.training += span
        steps = progress.step - self.marked_step
        self.marked_step = progress.step
        self._count(drained, steps)
        if progress.step == 1 and drained.skipped and not job.step.scale.on:
            raise Failure(
                "the loss or the gradient of the first step is not finite, before anything was updated",
                "the weights of the model are broken (nan or inf): copy its folder again, or take an older checkpoint",
            )
        rate = drained.tokens / span
        row = {
            "loss": drained.loss,
            **drained.means,
            "lr": job.peak_lr * scale,
            **({} if job.peak_matrix_lr is None else {"matrix_lr": job.peak_matrix_lr * scale}),
            "grad_norm": drained.grad_norm,
            "tokens": progress.tokens,
            "tokens_per_s": rate,
            "mfu": rate * job.flops_per_token / job.peak_flops / job.world.size if job.peak_flops else None,
            "memory_bytes": job.device.peak_memory(),
            "data_wait": drained.data_wait_s / span,
            "eta_s": span / max(steps, 1) * (job.total_steps - progress.step),
            "targets": drained.targets,
            **job.describe(progress.loader),
        }
        if job.watch is not None:
            row.update(job.watch.take(span, drained.tokens * share(job.world)))
        if progress.skipped:
            row["skipped"] = progress.skipped
        job.metrics.train(progress.step, row)
        return drained.stop

    def _count(self, drained: Drained, steps: int) -> None:
        progress = self.progress
        progress.tokens += drained.tokens
        progress.skipped += drained.skipped
        if drained.targets:
            progress.last_loss = drained.loss
        self.barren = self.barren + drained.skipped if drained.skipped >= steps else 0
        if self.barren >= _HOPELESS:
            raise Failure(
                f"the loss or the gradient norm was not finite in the last {self.barren} steps",
                "lower optim.lr and optim.matrix_lr, or continue from an older checkpoint with another seed",
            )


@contextlib.contextmanager
def _signals(step: TrainStep) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and the first Ctrl-C end the run at the next step border; the second Ctrl-C at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def wish(number: int, frame: FrameType | None) -> None:
        if step.stop_signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        step.stop_signal = number
        when = "at the end of this step" if step.stops_at_once else "at the next logged step"
        log.info(f"{signal.Signals(number).name}: saving {when}")

    before = {number: signal.signal(number, wish) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
