"""Two steps before the first: what a micro-batch takes and how fast it is, with every update refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from anabatic.config.train import LoopJob
from anabatic.core import log
from anabatic.device.device import Device
from anabatic.parallel.world import World, all_gather_text
from anabatic.plan import fit
from anabatic.plan.memory import memory
from anabatic.plan.setup import Setup
from anabatic.train import auto, paper
from anabatic.train.auto import State
from anabatic.train.plan import Sizes
from anabatic.train.step import TrainStep

_WORTH = 1.03
"""A larger micro-batch that is not 3 % faster is not worth its memory."""
_PASSES = 2
"""Micro-batches of a rehearsed step at most: from the second on gradients are added up."""


@dataclass(frozen=True)
class Try:
    """What two steps took: bytes of the busiest device at its peak, tokens a second of all ranks."""

    sizes: Sizes
    peak: int
    tokens_per_s: float


def choose(
    job: LoopJob,
    state: State,
    setup: Setup | None,
    sizes: Sizes,
    step: TrainStep,
    batches: Callable[[int], AbstractContextManager[Any]],
    device: Device,
    world: World,
) -> Sizes:
    """Try the micro-batch of `sizes`, and larger ones while they fit and pay; return the fastest.

    Args:
        setup: what the plan counts by; None: nothing larger is tried.
        batches: makes the data of a micro-batch's size, to be closed.

    Raises:
        StartAgain: memory ran out.
    """
    tries: list[Try] = []
    wanted: Sizes | None = sizes
    least = sizes.micro_batch_tokens if setup is None else setup.least
    while wanted is not None:
        with auto.out_of_memory(job, device, world, least, wanted), batches(wanted.micro_batch_tokens) as data:
            tries.append(_measure(step, data, wanted, device, world))
        _tell(tries[-1], setup, device, world)
        slower = len(tries) > 1 and tries[-1].tokens_per_s < _WORTH * tries[-2].tokens_per_s
        fixed = job.batch.micro_batch_tokens is not None
        wanted = None if slower or fixed or setup is None else _larger(tries[-1], setup, state, device)
    return max(tries, key=lambda one: one.tokens_per_s).sizes


def _measure(step: TrainStep, data: Any, sizes: Sizes, device: Device, world: World) -> Try:
    passes = min(_PASSES, sizes.micro_steps)
    device.forget_peak()
    seconds = 0.0
    for _ in range(2):  # the first one also makes what the second finds
        device.synchronize()
        begun = time.perf_counter()
        step.rehearse(data, passes)
        device.synchronize()
        seconds = time.perf_counter() - begun
    told = [text.split() for text in all_gather_text(f"{device.peak_memory()} {seconds}", world)]
    slowest = max(float(taken) for _, taken in told)
    tokens = passes * sizes.micro_batch_tokens * world.data.size
    return Try(sizes, max(int(peak) for peak, _ in told), tokens / slowest)


def _larger(last: Try, setup: Setup, state: State, device: Device) -> Sizes | None:
    """Twice the micro-batch, where the plan's count, corrected by what was measured, says that it fits."""
    sizes, chip = last.sizes, paper.chip_of(device)
    micro = 2 * sizes.micro_batch_tokens
    if sizes.micro_steps % 2 or micro > fit.most_tokens(chip) or (state.most is not None and micro > state.most):
        return None
    now, then = (memory(_as(setup, one, sizes)).total for one in (sizes.micro_batch_tokens, micro))
    expected = then if device.type in ("cpu", "mps") else then * max(1.0, last.peak / now)
    if expected * (1 + fit.FRAGMENTS) + fit.buffers(setup, chip) > fit.room(chip):
        return None
    return replace(sizes, micro_batch_tokens=micro, micro_steps=sizes.micro_steps // 2)


def _as(setup: Setup, micro: int, sizes: Sizes) -> Setup:
    steps = max(1, sizes.micro_batch_tokens * sizes.micro_steps // micro)
    return replace(setup, micro_tokens=micro, micro_steps=steps)


def _tell(one: Try, setup: Setup | None, device: Device, world: World) -> None:
    paper_says = ""
    if setup is not None and device.type not in ("cpu", "mps"):
        planned = memory(_as(setup, one.sizes.micro_batch_tokens, one.sizes)).total
        paper_says = f", on paper {planned / 2**30:.3g}"
    log.info(
        f"auto: two steps with {one.sizes.told(world.data)}: {one.tokens_per_s:,.0f} tokens/s,"
        f" peak {one.peak / 2**30:.3g} of {device.memory_bytes() / 2**30:.3g} GiB{paper_says}"
    )
