"""What a training does when memory runs out: an error that says what helps; with `--auto`, a start with less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from anabatic.config.rl import RlJob
from anabatic.config.sections.train_jobs import LoopJob, WithAuto, is_auto
from anabatic.core import relaunch
from anabatic.core.errors import Failure, RestartRequested
from anabatic.core.paths import RunFolder
from anabatic.device.device import Device
from anabatic.parallel.world import World
from anabatic.train.auto.state import AUTO_FILE, AutoState, save_state
from anabatic.train.sizing import StepSizes, find_divisor

REFUSALS = (RuntimeError, MemoryError)
"""Kinds of errors among which an allocator's refusal is."""
_OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "Cannot allocate memory")
"""What torch says where its allocator for the processor gets nothing (c10/core/impl/alloc_cpu.cpp)."""


@contextmanager
def handle_out_of_memory(
    job: LoopJob, device: Device, world: World, least: int, sizes: StepSizes | None = None
) -> Iterator[None]:
    """Turn an allocator's refusal into an error that says what to do; with `auto`, into a start with less.

    Args:
        least: tokens of the smallest micro-batch.
        sizes: of the training; None: it has not begun, memory does not suffice for the model.

    Raises:
        RestartRequested: what the next start will do is written down.
        Failure: there is no less.
    """
    try:
        yield
    except REFUSALS as error:
        raise_advice(error, job, device, world, least, sizes)
        raise


def raise_advice(
    error: BaseException, job: LoopJob, device: Device, world: World, least: int, sizes: StepSizes | None = None
) -> None:
    """Raise what to do about an allocator's refusal; return where the error is another one.

    Args, Raises: as `handle_out_of_memory`.
    """
    is_refusal = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if is_refusal or any(part in str(error) for part in _OUT_OF_MEMORY_MESSAGES):
        raise _plan_retry(job, device, world, least, sizes, error) from error


def _plan_retry(
    job: LoopJob, device: Device, world: World, least: int, sizes: StepSizes | None, error: BaseException
) -> Failure:
    said = " ".join(str(error).split()).rpartition("DefaultCPUAllocator: ")[2]
    what = said.partition(" (")[0].partition(". Error code")[0] or "not enough memory"
    where = what if world.size == 1 else f"rank {world.rank}, {what}"
    micro = None if sizes is None else _shrink_micro_batch(sizes, world, least)
    if not is_auto(job):
        return Failure(
            where if sizes is None else f"{where}, at {sizes.format_sizes(world.data_group)}", _suggest_fix(job, micro)
        )
    path = RunFolder(job.out).root / AUTO_FILE  # of this rank alone: no other answers any more
    state = AutoState.from_json(path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "")
    if micro is not None and sizes is not None:
        steps = sizes.micro_batch_tokens * sizes.micro_steps // micro
        batch = micro * steps * world.data_group.size
        state = replace(state, lowered=state.lowered + 1, micro=micro, most=micro, batch=batch)
        message = (
            f"{where}, at {sizes.format_sizes(world.data_group)}: now {micro:,} tokens x {steps}, {batch:,} "
            f"a step as before"
        )
    elif state.way is not None:
        refused = (*state.refused, state.way)
        state = replace(state, lowered=state.lowered + 1, way=None, micro=None, most=None, refused=refused)
        when = "before the first step" if sizes is None else "with the smallest micro-batch"
        message = f"{where}, {when}: {refused[-1].format()} is not tried again"
    else:
        return Failure(where, _suggest_fix(job, None))
    save_state(job, state)
    if (reports := relaunch.get_reports_folder()) is not None:
        (reports / relaunch.RESTART_FILE).write_text(message, encoding="utf-8")
    return RestartRequested(message, f"{path} holds what comes next: the same command continues")


def _shrink_micro_batch(sizes: StepSizes, world: World, least: int) -> int | None:
    """Return at most half of the micro-batch that keeps the global batch; None where it is less than a segment."""
    micro = sizes.micro_batch_tokens
    return find_divisor(micro * sizes.micro_steps * world.data_group.size, world.data_group.size, micro // 2, least)


def _suggest_fix(job: LoopJob, micro: int | None) -> str:
    hint = "`anabatic plan -- COMMAND` shows what takes the memory"
    if isinstance(job, RlJob):
        return f"lower device_batch_size, now {job.device_batch_size}, or sampling.max_new_tokens; {hint}"
    if micro is not None:
        hint = f"--batch.micro-batch-tokens {micro} keeps the global batch; {hint}"
    return f"--auto does what fits by itself; {hint}" if isinstance(job, WithAuto) else hint
