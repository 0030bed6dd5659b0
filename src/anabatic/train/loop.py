"""The loop: when to log, save, evaluate and stop. How a step is made is in `step.py`."""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable

from anabatic.core import log
from anabatic.core.errors import Failure
from anabatic.core.heart import HEART
from anabatic.core.stopping import LISTENER
from anabatic.core.text import duration
from anabatic.parallel.world import barrier
from anabatic.train import bad_steps
from anabatic.train.progress import Fit, Progress
from anabatic.train.saver import Saver
from anabatic.train.schedule import lr_scale
from anabatic.train.step import Drained, TrainStep
from anabatic.train.watch import share

_HOPELESS = 50
"""Skipped updates in a row of logged windows after which the job gives up."""


def fit(job: Fit, progress: Progress) -> bool:
    """Train until `total_steps` or until `eval.patience` is over; return False when a signal ended the run early
    (everything is saved then).

    Raises:
        Failure: no finite loss for a long time, or nothing can be saved.
    """
    clock = _Clock(job, progress)
    HEART.beat(progress.step)
    barrier(
        job.world
    )  # a rank that has nothing to save yet leaves at once: none may wait in a step for one that has left
    with (
        LISTENER.deferred(_tell_stop(job.step)),
        Saver(job.folder, job.save, job.device, job.world, progress.step) as saver,
    ):
        if _owes(job, progress):
            _evaluate(job, progress, clock, saver)
        while progress.step < job.total_steps and not progress.enough(job.eval):
            _tell(job, saver)
            bad_steps.pass_over(job, progress)
            scale = lr_scale(progress.step + 1, job.total_steps, job.schedule)
            batch = job.step.run(job.batches, job.micro_steps, scale)
            if batch is None:
                progress.seconds = clock.seconds()
                return _stop(job, progress, saver)
            progress.step += 1
            HEART.beat(progress.step)
            progress.loader = batch.state
            if job.rows is not None:
                job.rows.write(progress.step, job.step.rows)
            last = progress.step == job.total_steps
            # One process, or several on a CPU, stop here without writing a row, so that the rows to come are those of a
            # run left alone; devices agree on it where they log, because their queues are not emptied for it.
            stop = not last and job.step.stops()
            logs = last or progress.step == 1 or progress.step % job.log.every == 0
            saves = last or stop or (job.save.every > 0 and progress.step % job.save.every == 0)
            if (logs or saves) and bad_steps.look(job, progress, saver):
                clock.rewound()
                continue
            if logs:
                stop = (clock.log(scale) and not last) or stop
            if saves or stop:
                progress.seconds = clock.seconds()
                _save(job, progress, saver)
            if stop:
                return _stop(job, progress, saver)
            if _evaluates(job, progress.step):
                _evaluate(job, progress, clock, saver)
            if progress.step == 1:
                clock.pause()  # it takes half a second, which would make the next row's speed and ETA wrong
                gc.collect()
                gc.freeze()  # what exists now lives to the end: do not walk it again at every collection
                clock.go_on()
        if progress.step < job.total_steps:
            _stop_early(job, progress, clock, saver)
        saver.wait()
        _tell(job, saver)
    progress.seconds = clock.seconds()
    return True


def _stop_early(job: Fit, progress: Progress, clock: _Clock, saver: Saver) -> None:
    log.info(
        f"early stopping after step {progress.step}: {progress.stale} evaluations without a better {job.eval.metric};"
        f" the best was after step {progress.best['step']}"
    )
    job.metrics.event("early_stop", step=progress.step, best=progress.best["step"])
    clock.rest()
    progress.seconds = clock.seconds()
    _save(job, progress, saver)


def _stop(job: Fit, progress: Progress, saver: Saver) -> bool:
    _save(job, progress, saver)
    saver.wait()
    _tell(job, saver)
    told = f"after step {progress.step}: saved; the same command continues"
    log.info(f"stopped {told if progress.step else 'in the first step: the same command begins anew'}")
    job.metrics.event("stop", step=progress.step)
    return False


def _save(job: Fit, progress: Progress, saver: Saver) -> None:
    if saver.step == progress.step:
        return
    host = {
        "progress": vars(progress), "identity": job.identity, "sizes": job.sizes, "world_size": job.world.size,
        "about": job.about,
    }  # fmt: skip
    saver.save(progress.step, job.tensors(), host, progress.best.get("step"))
    _tell(job, saver)


def _tell(job: Fit, saver: Saver) -> None:
    """Say which checkpoints have become whole."""
    for saved in saver.done():
        waited = f", in the background; the training waited {1000 * saved.stall:.0f} ms" if saved.background else ""
        log.info(f"saved {saved.path} in {duration(saved.seconds)}{waited}")
        job.metrics.event(
            "checkpoint", step=saved.step, path=str(saved.path), seconds=round(saved.seconds, 3),
            stall_s=round(saved.stall, 3),
        )  # fmt: skip


def _owes(job: Fit, progress: Progress) -> bool:
    """True when the model as it is has not been measured: a checkpoint is written before the evaluation of its step."""
    if progress.step == 0:
        return job.begins
    return progress.evaluated < progress.step and _evaluates(job, progress.step)


def _evaluates(job: Fit, step: int) -> bool:
    return step == job.total_steps or (job.eval.every > 0 and step % job.eval.every == 0)


def _evaluate(job: Fit, progress: Progress, clock: _Clock, saver: Saver) -> None:
    clock.pause()
    row = job.evaluate(progress.step)
    progress.evaluated = progress.step
    clock.go_on()
    if not row:
        return
    job.metrics.evaluate(progress.step, row)
    loss = row.get("valid_loss")  # rewards have none
    if loss is not None and not math.isfinite(loss):
        raise Failure(
            f"the held-out loss after step {progress.step} is {loss}: an update has destroyed the weights",
            "lower optim.lr and optim.matrix_lr, and start over with --save.resume never",
        )
    if progress.judge(progress.step, row, job.eval):
        job.keep_best()
        if job.save.keep_best:
            _save(job, progress, saver)
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

    def rewound(self) -> None:
        """Begin anew after an earlier step: the row of what was undone is not written."""
        now = time.perf_counter()
        self.training, self.held, self.mark = self.training + self.held + now - self.mark, 0.0, now
        self.marked_step, self.barren = self.progress.step, 0

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
            "loss": drained.loss if drained.targets else None,
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


def _tell_stop(step: TrainStep) -> Callable[[int], None]:
    """Return what hands a signal to the step and says so: the run ends at the next step border."""

    def tell(number: int) -> None:
        step.stop_signal = number
        when = "at the end of this step" if step.stops_at_once else "at the next logged step"
        log.info(f"{signal.Signals(number).name}: saving {when}")

    return tell
