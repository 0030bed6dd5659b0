"""The loop: when to log, save, evaluate and stop. How a step is made is in `step.py`."""

from __future__ import annotations

import gc
import math
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from anabatic.core import log
from anabatic.core.errors import Failure
from anabatic.core.formatting import format_duration
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.core.stop_signals import SIGNAL_LISTENER
from anabatic.device.compile_time import COMPILE_CLOCK
from anabatic.parallel.collectives import barrier, broadcast_text
from anabatic.train.checkpoint.memory_copies import MemoryCopies
from anabatic.train.checkpoint.run_state import TrainProgress
from anabatic.train.checkpoint.saver import CheckpointSaver
from anabatic.train.context import LoopContext
from anabatic.train.guards import bad_steps
from anabatic.train.guards.replica_check import ReplicaCheck
from anabatic.train.guards.stragglers import StragglerMonitor
from anabatic.train.metrics.device_stats import local_token_fraction
from anabatic.train.optim.optimizer import compute_lr_scale
from anabatic.train.step import StepStats, TrainStep
from anabatic.train.time_budget import TimeBudget, agree_on_steps

_MIN_LOGGED_COMPILING = 0.1
"""Seconds; shorter compilations are not logged."""
_MAX_SKIPPED_STEPS = 50
"""Skipped updates in a row of logged windows after which the job gives up."""


def fit(loop: LoopContext, progress: TrainProgress) -> bool:
    """Train until `sizes.steps` or until `eval.patience` is over; return False when a signal ended the run early
    (everything is saved then). With `schedule.minutes`, `loop.sizes` gets the steps that fit.

    Raises:
        Failure: no finite loss for a long time, or nothing can be saved.
    """
    clock = _MetricsClock(loop, progress)
    replicas = ReplicaCheck(loop) if loop.job.parallel.check_replicas else None
    _record_beat(progress.step)
    barrier(
        loop.world
    )  # a rank that has nothing to save yet leaves at once: none may wait in a step for one that has left
    reason = ""
    with (
        SIGNAL_LISTENER.defer_signals(_make_stop_handler(loop.train_step)),
        CheckpointSaver(loop.folder, loop.job.save, loop.device, loop.world, progress.step) as saver,
        _open_memory_copies(loop) as copies,
    ):
        if _has_pending_eval(loop, progress):
            _evaluate_model(loop, progress, clock, saver)
        while progress.step < loop.sizes.steps and not (reason or progress.should_stop(loop.job.eval)):
            _begin_step(loop, progress, saver)
            scale = compute_lr_scale(progress.step + 1, loop.sizes.steps, loop.job.schedule)
            batch = loop.train_step.run_step(loop.batches, loop.sizes.micro_steps, scale)
            if batch is None:
                progress.seconds = clock.total_seconds()
                return _save_and_stop(loop, progress, saver)
            progress.step += 1
            _record_beat(progress.step)
            progress.loader = batch.loader_state
            if loop.row_log is not None:
                loop.row_log.write(progress.step, loop.train_step.last_rows)
            last = progress.step == loop.sizes.steps
            # One process, or several on a CPU, stop here without writing a row, so that the rows to come are those of a
            # run left alone; devices agree on it where they log, because their queues are not emptied for it.
            stop = not last and loop.train_step.should_stop()
            logs = last or clock.is_logged(progress.step)
            saves = last or stop or (loop.job.save.every > 0 and progress.step % loop.job.save.every == 0)
            copied = _is_copy_due(copies, progress) and not (last or stop)
            if (logs or saves or copied) and _handle_bad_steps(loop, progress, saver, copies):
                clock.restart_after_rewind()
                continue
            if logs:
                stop = (clock.log_row(scale) and not last) or stop
            _check_replicas(replicas, progress, saves or stop or copied or _should_evaluate(loop, progress.step))
            if copied or saves or stop:
                progress.seconds = clock.total_seconds()
                _save_state(loop, progress, copies if copied else None, saver if saves or stop else None)
            if stop:
                return _save_and_stop(loop, progress, saver)
            evaluates = _should_evaluate(loop, progress.step)
            if evaluates:
                _evaluate_model(loop, progress, clock, saver)
            reason = _find_callback_stop(loop) if (logs or saves or evaluates) and not last else ""
            if progress.step == 1:
                _freeze_objects(clock)
        if progress.step < loop.sizes.steps:
            _stop_early(loop, progress, clock, saver, reason)
        saver.wait()
        _log_saved_checkpoints(loop, saver)
    progress.seconds = clock.total_seconds()
    return True


def _record_beat(step: int) -> None:
    if HEARTBEAT.is_open:
        HEARTBEAT.record_beat(step)


def _open_memory_copies(loop: LoopContext) -> AbstractContextManager[MemoryCopies | None]:
    if not loop.job.save.memory_every:
        return nullcontext()
    return MemoryCopies(loop.job, loop.folder, loop.device, loop.world)


def _is_copy_due(copies: MemoryCopies | None, progress: TrainProgress) -> bool:
    return copies is not None and copies.is_due(progress.step)


def _begin_step(loop: LoopContext, progress: TrainProgress, saver: CheckpointSaver) -> None:
    _log_saved_checkpoints(loop, saver)
    if progress.dropped:
        bad_steps.skip_dropped_data(loop, progress)


def _handle_bad_steps(
    loop: LoopContext, progress: TrainProgress, saver: CheckpointSaver, copies: MemoryCopies | None
) -> bool:
    """Act on the bad steps since the last look, the same on every rank; return True when the training went back."""
    found = loop.train_step.spike_detector.take_bad_steps()
    if not found or not bad_steps.handle_bad_steps(loop, progress, saver, found):
        return False
    if copies is not None:
        copies.discard()
    return True


def _check_replicas(replicas: ReplicaCheck | None, progress: TrainProgress, saves: bool) -> None:
    if replicas is not None:
        replicas.check_when_due(progress, saves)


def _freeze_objects(clock: _MetricsClock) -> None:
    """Take what exists now, which lives to the end, out of the garbage collector's walks."""
    clock.pause_clock()  # it takes half a second, which would make the next row's speed and ETA wrong
    gc.collect()
    gc.freeze()
    clock.resume_clock()


def _find_callback_stop(loop: LoopContext) -> str:
    """Return why a callback wishes to stop, the same on every rank; empty: none does."""
    if not loop.job.log.callbacks:  # objects are given to one process alone
        return loop.metrics.stop_reason
    return broadcast_text(loop.metrics.stop_reason, loop.world)


def _stop_early(
    loop: LoopContext, progress: TrainProgress, clock: _MetricsClock, saver: CheckpointSaver, reason: str
) -> None:
    best = progress.best.get("step")
    why = f"{progress.stale} evaluations without a better {loop.job.eval.metric}; the best was after step {best}"
    log.info(f"early stopping after step {progress.step}: {f'callback {reason}' if reason else why}")
    loop.metrics.log_event("early_stop", step=progress.step, best=best, **({"callback": reason} if reason else {}))
    clock.log_remaining()
    progress.seconds = clock.total_seconds()
    _save_checkpoint(loop, progress, saver)


def _save_and_stop(loop: LoopContext, progress: TrainProgress, saver: CheckpointSaver) -> bool:
    _save_checkpoint(loop, progress, saver)
    saver.wait()
    _log_saved_checkpoints(loop, saver)
    told = f"after step {progress.step}: saved; the same command continues"
    log.info(f"stopped {told if progress.step else 'in the first step: the same command starts again'}")
    loop.metrics.log_event("stop", step=progress.step)
    return False


def _save_state(
    loop: LoopContext, progress: TrainProgress, copies: MemoryCopies | None, saver: CheckpointSaver | None
) -> None:
    """Copy the state to the machines' memory first: it is the shorter wait."""
    if copies is not None:
        copies.save(progress.step, loop.checkpoint_tensors(), loop.run_state(progress, loop.sizes))
    if saver is not None:
        _save_checkpoint(loop, progress, saver)


def _save_checkpoint(loop: LoopContext, progress: TrainProgress, saver: CheckpointSaver) -> None:
    if saver.step == progress.step:
        return
    saver.save(
        progress.step, loop.checkpoint_tensors(), loop.run_state(progress, loop.sizes), progress.best.get("step")
    )
    _log_saved_checkpoints(loop, saver)


def _log_saved_checkpoints(loop: LoopContext, saver: CheckpointSaver) -> None:
    """Say which checkpoints have become whole."""
    for saved in saver.take_finished():
        waited = (
            f", in the background; the training waited {1000 * saved.stall_seconds:.0f} ms"
            if saved.is_background
            else ""
        )
        log.info(f"saved {saved.path} in {format_duration(saved.seconds)}{waited}")
        loop.metrics.log_checkpoint(
            saved.step, saved.path, seconds=round(saved.seconds, 3), stall_s=round(saved.stall_seconds, 3)
        )


def _has_pending_eval(loop: LoopContext, progress: TrainProgress) -> bool:
    """Return whether the model is not evaluated yet at this step: a checkpoint is saved before its evaluation."""
    if progress.step == 0:
        return loop.should_eval_at_start
    return progress.evaluated < progress.step and _should_evaluate(loop, progress.step)


def _should_evaluate(loop: LoopContext, step: int) -> bool:
    return step == loop.sizes.steps or (loop.job.eval.every > 0 and step % loop.job.eval.every == 0)


def _evaluate_model(loop: LoopContext, progress: TrainProgress, clock: _MetricsClock, saver: CheckpointSaver) -> None:
    clock.pause_clock()
    row = loop.evaluate_step(progress.step)
    progress.evaluated = progress.step
    clock.resume_clock()
    if not row:
        return
    loop.metrics.log_evaluation(progress.step, row)
    loss = row.get("valid_loss")  # rewards have none
    if loss is not None and not math.isfinite(loss):
        raise Failure(
            f"the held-out loss after step {progress.step} is {loss}: an update has destroyed the weights",
            "lower optim.lr and optim.matrix_lr, and start over with --save.resume never",
        )
    if progress.record_evaluation(progress.step, row, loop.job.eval):
        loop.save_best_model()
        if loop.job.save.keep_best:
            _save_checkpoint(loop, progress, saver)
    clock.resume_clock()


class _MetricsClock:
    """Turns what the step counted into a row of metrics. Evaluation and compilation do not count as training time."""

    def __init__(self, loop: LoopContext, progress: TrainProgress) -> None:
        self.loop, self.progress = loop, progress
        self.prior_seconds = progress.seconds
        self.training_seconds = self.pending_seconds = 0.0
        self.read_clock = COMPILE_CLOCK.read if COMPILE_CLOCK.is_watching else time.perf_counter
        self.start_time = self.read_clock()
        self.logged_step = progress.step
        self.skipped_in_a_row = 0
        self.reported_compiling = COMPILE_CLOCK.read_compiling() if COMPILE_CLOCK.is_watching else 0.0
        minutes = loop.job.schedule.minutes
        self.time_budget = None if minutes is None else TimeBudget(minutes)
        self.stragglers = StragglerMonitor(loop) if loop.world.size > 1 else None

    def is_logged(self, step: int) -> bool:
        """Return whether a row ends with a step."""
        early = self.time_budget is not None and self.time_budget.is_early_row(step)
        return step == 1 or step % self.loop.job.log.every == 0 or early

    def total_seconds(self) -> float:
        return self.prior_seconds + self.training_seconds + self.pending_seconds + self.read_clock() - self.start_time

    def pause_clock(self) -> None:
        """Keep what has passed since the last row."""
        self.pending_seconds += self.read_clock() - self.start_time
        if self.loop.device_window is not None:
            self.loop.device_window.set_paused(True)

    def resume_clock(self) -> None:
        """Count again from now on."""
        self.start_time = self.read_clock()
        if self.loop.device_window is not None:
            self.loop.device_window.set_paused(False)

    def restart_after_rewind(self) -> None:
        """Begin anew after an earlier step: the row of what was undone is not written."""
        now = self.read_clock()
        self.training_seconds, self.pending_seconds, self.start_time = (
            self.training_seconds + self.pending_seconds + now - self.start_time,
            0.0,
            now,
        )
        self.logged_step, self.skipped_in_a_row = self.progress.step, 0

    def log_remaining(self) -> None:
        """Write the row of the steps since the last one, if there are any."""
        if self.progress.step > self.logged_step:
            self.log_row(compute_lr_scale(self.progress.step, self.loop.sizes.steps, self.loop.job.schedule))

    def log_row(self, scale: float) -> bool:
        """Write one row; return True when some rank wishes to stop."""
        loop, progress = self.loop, self.progress
        drained = loop.train_step.read_stats()
        now = self.read_clock()
        span, self.start_time, self.pending_seconds = max(self.pending_seconds + now - self.start_time, 1e-9), now, 0.0
        self.training_seconds += span
        if COMPILE_CLOCK.is_watching:
            self._report_compiling()
        steps = progress.step - self.logged_step
        self.logged_step = progress.step
        if self.time_budget is not None and progress.step < loop.sizes.steps:
            self._fit_steps(self.time_budget, steps, span)
        self._count_steps(drained, steps)
        if progress.step == 1 and drained.skipped and not loop.train_step.loss_scale.is_enabled:
            raise Failure(
                "the loss or the gradient of the first step is not finite, before anything was updated",
                "the weights of the model are broken (nan or inf): copy its folder again, or use an older checkpoint",
            )
        rate = drained.tokens / span
        row = {
            "loss": drained.loss if drained.targets else None,
            **drained.means,
            "lr": loop.sizes.lr * scale,
            **({"matrix_lr": loop.sizes.matrix_lr * scale} if loop.job.optim.name == "muon" else {}),
            "grad_norm": drained.grad_norm,
            "tokens": progress.tokens,
            "tokens_per_s": rate,
            "mfu": rate * loop.flops_per_token / loop.peak_flops / loop.world.size if loop.peak_flops else None,
            "memory_bytes": loop.device.get_peak_memory(),
            "data_wait": drained.data_wait_s / span,
            "eta_s": span / max(steps, 1) * (loop.sizes.steps - progress.step),
            "targets": drained.targets,
            **loop.describe_loader(progress.loader),
        }
        if loop.device_window is not None:
            row.update(loop.device_window.take_figures(span, drained.tokens * local_token_fraction(loop.world)))
        if self.stragglers is not None:
            row.update(self.stragglers.judge_row(progress.step, span, steps, drained.data_wait_s))
        if progress.skipped:
            row["skipped"] = progress.skipped
        loop.metrics.log_train_step(progress.step, row)
        return drained.should_stop

    def _report_compiling(self) -> None:
        compiling = COMPILE_CLOCK.read_compiling()
        if compiling - self.reported_compiling > _MIN_LOGGED_COMPILING:
            log.info(f"compiling took {compiling - self.reported_compiling:.1f} s and does not count as training time")
            self.reported_compiling = compiling
            if self.loop.compiled_code is not None:
                self.loop.compiled_code.save_new_files()

    def _fit_steps(self, budget: TimeBudget, steps: int, span: float) -> None:
        """Count the steps that fit into the given time; every rank calls it."""
        loop, before, step = self.loop, self.loop.sizes.steps, self.progress.step
        elapsed, max_steps = self.prior_seconds + self.training_seconds, loop.job.schedule.max_steps
        fitting = agree_on_steps(budget.count_steps(before, step, elapsed, steps, span), loop.world)
        total = min(fitting, max_steps or fitting)
        if total == before:
            return
        loop.sizes = replace(loop.sizes, steps=total)
        loop.metrics.set_max_steps(total)
        if step == 16 or abs(total - before) > 0.2 * before:
            log.info(budget.describe(fitting, step, elapsed, max_steps))
            loop.metrics.log_event("horizon", step=step, steps=total)

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
        log.info_in_signal_handler(f"{signal.Signals(number).name}: saving {when}")

    return handle_signal
