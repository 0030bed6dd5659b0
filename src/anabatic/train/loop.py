"""The loop: when to log, save, evaluate and stop. How a step is made is in `step.py`."""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable

from anabatic.core import log
from anabatic.core.errors import Failure
from anabatic.core.formatting import format_duration
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.core.stop_signals import SIGNAL_LISTENER
from anabatic.parallel.process_groups import barrier
from anabatic.train.checkpoint.saver import CheckpointSaver
from anabatic.train.guards import bad_steps
from anabatic.train.loop_state import LoopContext, TrainProgress
from anabatic.train.metrics.device_stats import local_token_fraction
from anabatic.train.optim.lr_schedule import compute_lr_scale
from anabatic.train.step import StepStats, TrainStep

_MAX_SKIPPED_STEPS = 50
"""Skipped updates in a row of logged windows after which the job gives up."""


def fit(job: LoopContext, progress: TrainProgress) -> bool:
    """Train until `total_steps` or until `eval.patience` is over; return False when a signal ended the run early
    (everything is saved then).

    Raises:
        Failure: no finite loss for a long time, or nothing can be saved.
    """
    clock = _MetricsClock(job, progress)
    HEARTBEAT.record_beat(progress.step)
    barrier(
        job.world
    )  # a rank that has nothing to save yet leaves at once: none may wait in a step for one that has left
    with (
        SIGNAL_LISTENER.defer_signals(_make_stop_handler(job.train_step)),
        CheckpointSaver(job.folder, job.save, job.device, job.world, progress.step) as saver,
    ):
        if _has_pending_eval(job, progress):
            _evaluate_model(job, progress, clock, saver)
        while progress.step < job.total_steps and not progress.should_stop(job.eval):
            _log_saved_checkpoints(job, saver)
            bad_steps.skip_dropped_data(job, progress)
            scale = compute_lr_scale(progress.step + 1, job.total_steps, job.schedule)
            batch = job.train_step.run_step(job.batches, job.micro_steps, scale)
            if batch is None:
                progress.seconds = clock.total_seconds()
                return _save_and_stop(job, progress, saver)
            progress.step += 1
            HEARTBEAT.record_beat(progress.step)
            progress.loader = batch.loader_state
            if job.row_log is not None:
                job.row_log.write(progress.step, job.train_step.last_rows)
            last = progress.step == job.total_steps
            # One process, or several on a CPU, stop here without writing a row, so that the rows to come are those of a
            # run left alone; devices agree on it where they log, because their queues are not emptied for it.
            stop = not last and job.train_step.should_stop()
            logs = last or progress.step == 1 or progress.step % job.log.every == 0
            saves = last or stop or (job.save.every > 0 and progress.step % job.save.every == 0)
            if (logs or saves) and bad_steps.handle_bad_steps(job, progress, saver):
                clock.restart_after_rewind()
                continue
            if logs:
                stop = (clock.log_row(scale) and not last) or stop
            if saves or stop:
                progress.seconds = clock.total_seconds()
                _save_checkpoint(job, progress, saver)
            if stop:
                return _save_and_stop(job, progress, saver)
            if _should_evaluate(job, progress.step):
                _evaluate_model(job, progress, clock, saver)
            if progress.step == 1:
                clock.pause_clock()  # it takes half a second, which would make the next row's speed and ETA wrong
                gc.collect()
                gc.freeze()  # what exists now lives to the end: do not walk it again at every collection
                clock.resume_clock()
        if progress.step < job.total_steps:
            _stop_early(job, progress, clock, saver)
        saver.wait()
        _log_saved_checkpoints(job, saver)
    progress.seconds = clock.total_seconds()
    return True


def _stop_early(job: LoopContext, progress: TrainProgress, clock: _MetricsClock, saver: CheckpointSaver) -> None:
    log.info(
        f"early stopping after step {progress.step}: {progress.stale} evaluations without a better {job.eval.metric};"
        f" the best was after step {progress.best['step']}"
    )
    job.metrics.log_event("early_stop", step=progress.step, best=progress.best["step"])
    clock.log_remaining()
    progress.seconds = clock.total_seconds()
    _save_checkpoint(job, progress, saver)


def _save_and_stop(job: LoopContext, progress: TrainProgress, saver: CheckpointSaver) -> bool:
    _save_checkpoint(job, progress, saver)
    saver.wait()
    _log_saved_checkpoints(job, saver)
    told = f"after step {progress.step}: saved; the same command continues"
    log.info(f"stopped {told if progress.step else 'in the first step: the same command begins anew'}")
    job.metrics.log_event("stop", step=progress.step)
    return False


def _save_checkpoint(job: LoopContext, progress: TrainProgress, saver: CheckpointSaver) -> None:
    if saver.step == progress.step:
        return
    host = {
        "progress": vars(progress),
        "identity": job.identity,
        "sizes": job.sizes,
        "world_size": job.world.size,
        "about": job.manifest_fields,
    }
    saver.save(progress.step, job.checkpoint_tensors(), host, progress.best.get("step"))
    _log_saved_checkpoints(job, saver)


def _log_saved_checkpoints(job: LoopContext, saver: CheckpointSaver) -> None:
    """Say which checkpoints have become whole."""
    for saved in saver.take_finished():
        waited = (
            f", in the background; the training waited {1000 * saved.stall_seconds:.0f} ms"
            if saved.is_background
            else ""
        )
        log.info(f"saved {saved.path} in {format_duration(saved.seconds)}{waited}")
        job.metrics.log_event(
            "checkpoint",
            step=saved.step,
            path=str(saved.path),
            seconds=round(saved.seconds, 3),
            stall_s=round(saved.stall_seconds, 3),
        )


def _has_pending_eval(job: LoopContext, progress: TrainProgress) -> bool:
    """True when the model as it is has not been measured: a checkpoint is written before the evaluation of its step."""
    if progress.step == 0:
        return job.should_eval_at_start
    return progress.evaluated < progress.step and _should_evaluate(job, progress.step)


def _should_evaluate(job: LoopContext, step: int) -> bool:
    return step == job.total_steps or (job.eval.every > 0 and step % job.eval.every == 0)


def _evaluate_model(job: LoopContext, progress: TrainProgress, clock: _MetricsClock, saver: CheckpointSaver) -> None:
    clock.pause_clock()
    row = job.evaluate_step(progress.step)
    progress.evaluated = progress.step
    clock.resume_clock()
    if not row:
        return
    job.metrics.log_evaluation(progress.step, row)
    loss = row.get("valid_loss")  # rewards have none
    if loss is not None and not math.isfinite(loss):
        raise Failure(
            f"the held-out loss after step {progress.step} is {loss}: an update has destroyed the weights",
            "lower optim.lr and optim.matrix_lr, and start over with --save.resume never",
        )
    if progress.record_evaluation(progress.step, row, job.eval):
        job.save_best_model()
        if job.save.keep_best:
            _save_checkpoint(job, progress, saver)
    clock.resume_clock()


class _MetricsClock:
    """Turns what the step counted into a row of metrics. Time spent on evaluation does not count as training."""

    def __init__(self, job: LoopContext, progress: TrainProgress) -> None:
        self.job, self.progress = job, progress
        self.prior_seconds = progress.seconds
        self.training_seconds = self.pending_seconds = 0.0
        self.start_time = time.perf_counter()
        self.logged_step = progress.step
        self.skipped_in_a_row = 0

    def total_seconds(self) -> float:
        return self.prior_seconds + self.training_seconds + self.pending_seconds + time.perf_counter() - self.start_time

    def pause_clock(self) -> None:
        """Keep what has passed since the last row."""
        self.pending_seconds += time.perf_counter() - self.start_time
        if self.job.device_window is not None:
            self.job.device_window.set_paused(True)

    def resume_clock(self) -> None:
        """Count again from now on."""
        self.start_time = time.perf_counter()
        if self.job.device_window is not None:
            self.job.device_window.set_paused(False)

    def restart_after_rewind(self) -> None:
        """Begin anew after an earlier step: the row of what was undone is not written."""
        now = time.perf_counter()
        self.training_seconds, self.pending_seconds, self.start_time = (
            self.training_seconds + self.pending_seconds + now - self.start_time,
            0.0,
            now,
        )
        self.logged_step, self.skipped_in_a_row = self.progress.step, 0

    def log_remaining(self) -> None:
        """Write the row of the steps since the last one, if there are any."""
        if self.progress.step > self.logged_step:
            self.log_row(compute_lr_scale(self.progress.step, self.job.total_steps, self.job.schedule))

    def log_row(self, scale: float) -> bool:
        """Write one row; return True when some rank wishes to stop."""
        job, progress = self.job, self.progress
        drained = job.train_step.read_stats()
        now = time.perf_counter()
        span, self.start_time, self.pending_seconds = max(self.pending_seconds + now - self.start_time, 1e-9), now, 0.0
        self.training_seconds += span
        steps = progress.step - self.logged_step
        self.logged_step = progress.step
        self._count_steps(drained, steps)
        if progress.step == 1 and drained.skipped and not job.train_step.loss_scale.is_enabled:
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
            "memory_bytes": job.device.get_peak_memory(),
            "data_wait": drained.data_wait_s / span,
            "eta_s": span / max(steps, 1) * (job.total_steps - progress.step),
            "targets": drained.targets,
            **job.describe_loader(progress.loader),
        }
        if job.device_window is not None:
            row.update(job.device_window.take_figures(span, drained.tokens * local_token_fraction(job.world)))
        if progress.skipped:
            row["skipped"] = progress.skipped
        job.metrics.log_train_step(progress.step, row)
        return drained.should_stop

    def _count_steps(self, drained: StepStats, steps: int) -> None:
        progress = self.progress
        progress.tokens += drained.tokens
        progress.skipped += drained.skipped
        if drained.targets:
            progress.last_loss = drained.loss
        self.skipped_in_a_row = self.skipped_in_a_row + drained.skipped if drained.skipped >= steps else 0
        if self.skipped_in_a_row >= _MAX_SKIPPED_STEPS:
            raise Failure(
                f"the loss or the gradient norm was not finite in the last {self.skipped_in_a_row} steps",
                "lower optim.lr and optim.matrix_lr, or continue from an older checkpoint with another seed",
            )


def _make_stop_handler(step: TrainStep) -> Callable[[int], None]:
    """Return what hands a signal to the step and says so: the run ends at the next step border."""

    def handle_signal(number: int) -> None:
        step.stop_signal = number
        when = "at the end of this step" if step.can_stop_at_once else "at the next logged step"
        log.info(f"{signal.Signals(number).name}: saving {when}")

    return handle_signal
