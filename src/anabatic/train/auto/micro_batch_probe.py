"""`--auto`: the micro-batch is tried in two steps that change nothing, and larger ones while they fit and pay."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core import log
from anabatic.device.device import Device
from anabatic.parallel.collectives import all_gather_text
from anabatic.parallel.world import World
from anabatic.plan import strategy_search
from anabatic.plan.memory_estimate import estimate_peak_memory
from anabatic.plan.training_setup import TrainingSetup
from anabatic.train import sizing
from anabatic.train.auto.out_of_memory import handle_out_of_memory
from anabatic.train.auto.state import AutoState
from anabatic.train.sizing import StepSizes
from anabatic.train.step import TrainStep

_MIN_SPEEDUP = 1.03
"""A larger micro-batch that is not 3 % faster is not worth its memory."""
_MAX_MICRO_BATCHES = 2
"""Micro-batches of a rehearsed step at most, for each chunk of a pipeline: from the second on gradients are added."""


@dataclass(frozen=True)
class MicroBatchTrial:
    """What two steps took: bytes of the busiest device at its peak, tokens a second of all ranks."""

    sizes: StepSizes
    peak_bytes: int
    tokens_per_s: float


def choose_micro_batch(
    job: LoopJob,
    state: AutoState,
    setup: TrainingSetup | None,
    sizes: StepSizes,
    step: TrainStep,
    batches: Callable[[int], AbstractContextManager[Any]],
    device: Device,
    world: World,
) -> StepSizes:
    """Try the micro-batch of `sizes`, and larger ones while they fit and pay; return the fastest.

    Of a pipeline none is larger: the fewer micro-batches a step has, the longer its stages wait.

    Args:
        setup: what the plan counts by; None: nothing larger is tried.
        batches: makes the data of a micro-batch's size, to be closed.

    Raises:
        RestartRequested: memory ran out.
    """
    tries: list[MicroBatchTrial] = []
    wanted: StepSizes | None = sizes
    least = sizes.micro_batch_tokens if setup is None else setup.min_micro_batch
    while wanted is not None:
        with (
            handle_out_of_memory(job, device, world, least, wanted),
            batches(wanted.micro_batch_tokens) as data,
        ):
            tries.append(_measure_steps(step, data, wanted, device, world))
        _log_trial(tries[-1], setup, device, world)
        slower = len(tries) > 1 and tries[-1].tokens_per_s < _MIN_SPEEDUP * tries[-2].tokens_per_s
        fixed = job.batch.micro_batch_tokens is not None or world.pipeline_group.size > 1
        wanted = None if slower or fixed or setup is None else _double_micro_batch(tries[-1], setup, state, device)
    return max(tries, key=lambda one: one.tokens_per_s).sizes


def _measure_steps(step: TrainStep, data: Any, sizes: StepSizes, device: Device, world: World) -> MicroBatchTrial:
    stages = world.pipeline_group.size * world.pipeline_chunks  # as many micro-batches may be kept for the way back
    passes = min(_MAX_MICRO_BATCHES * stages, sizes.micro_steps)
    device.reset_peak_memory()
    seconds = 0.0
    for _ in range(2):  # the first one also makes what the second finds
        device.synchronize()
        begun = time.perf_counter()
        step.probe_step(data, passes)
        device.synchronize()
        seconds = time.perf_counter() - begun
    told = [text.split() for text in all_gather_text(f"{device.get_peak_memory()} {seconds}", world)]
    slowest = max(float(taken) for _, taken in told)
    tokens = passes * sizes.micro_batch_tokens * world.data_group.size
    return MicroBatchTrial(sizes, max(int(peak) for peak, _ in told), tokens / slowest)


def _double_micro_batch(
    last: MicroBatchTrial, setup: TrainingSetup, state: AutoState, device: Device
) -> StepSizes | None:
    """Twice the micro-batch, where the plan's count, corrected by what was measured, says that it fits."""
    sizes, chip = last.sizes, sizing.get_local_chip(device)
    micro = 2 * sizes.micro_batch_tokens
    if (
        sizes.micro_steps % 2
        or micro > strategy_search.get_max_tokens(chip)
        or (state.most is not None and micro > state.most)
    ):
        return None
    now, then = (
        estimate_peak_memory(_with_micro_batch(setup, one, sizes)).total for one in (sizes.micro_batch_tokens, micro)
    )
    expected = then if device.type in ("cpu", "mps") else then * max(1.0, last.peak_bytes / now)
    if expected * (1 + strategy_search.FRAGMENTATION) + strategy_search.estimate_buffer_bytes(
        setup, chip
    ) > strategy_search.get_available_bytes(chip):
        return None
    return replace(sizes, micro_batch_tokens=micro, micro_steps=sizes.micro_steps // 2)


def _with_micro_batch(setup: TrainingSetup, micro: int, sizes: StepSizes) -> TrainingSetup:
    steps = max(1, sizes.micro_batch_tokens * sizes.micro_steps // micro)
    return replace(setup, micro_tokens=micro, micro_steps=steps)


def _log_trial(one: MicroBatchTrial, setup: TrainingSetup | None, device: Device, world: World) -> None:
    paper_says = ""
    if setup is not None and device.type not in ("cpu", "mps"):
        planned = estimate_peak_memory(_with_micro_batch(setup, one.sizes.micro_batch_tokens, one.sizes)).total
        paper_says = f"; estimated {planned / 2**30:.3g}"
    log.info(
        f"auto: two steps with {one.sizes.format_sizes(world.data_group)}: {one.tokens_per_s:,.0f} tokens/s,"
        f" peak {one.peak_bytes / 2**30:.3g} of {device.get_total_memory() / 2**30:.3g} GiB{paper_says}"
    )
