"""Search the strategies and micro-batches of a job that fit on a chip, and the fastest of them."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from anabatic.config.sections.common import Recompute
from anabatic.device.table import PROCESSOR_NAME, Chip, get_device_row
from anabatic.plan import cost_model
from anabatic.plan.memory_estimate import PeakMemory, estimate_peak_memory
from anabatic.plan.step_time import StepTime, estimate_step_time
from anabatic.plan.training_setup import StrategyName, TrainingSetup

IDLE_DEVICE_GIB = {"Ascend": 3.3, "NVIDIA": 0.7}
"""GiB in use on a device before the first tensor: `npu-smi info` of idle 910B3 cards shows 3,314 MiB; a CUDA context
of a recent driver. Others: nothing."""
FRAGMENTATION = 0.04
"""Assumed fraction of the peak that the allocator reserves and cannot use, with expandable segments."""
COMMUNICATOR_BYTES = 2.0 * 200 * 2**20
"""Bytes of each communicator of an NPU: twice HCCL_BUFFSIZE, whose default is 200 MB (HCCL documentation)."""
_MAX_DEVICE_TOKENS = 1 << 18
_MAX_CPU_TOKENS = 4096
"""Maximum tokens of a micro-batch on a CPU: larger ones exceed its caches and were slower (docs/dev)."""
HEADROOM = {"npu": 0.9, "cpu": 0.9, "reference": 0.7}
"""Fraction of the available memory that an automatically chosen micro-batch may use, by implementation of the
operators: the estimates were compared with allocators for the first two; the reference operators save more."""


def _get_needed_bytes(memory: PeakMemory, buffer_bytes: float) -> float:
    return memory.total * (1 + FRAGMENTATION) + buffer_bytes


@dataclass(frozen=True)
class StrategyEstimate:
    """A setup with its estimated memory and time."""

    setup: TrainingSetup
    memory: PeakMemory
    step_time: StepTime
    available_bytes: float
    """Bytes of the device available to the job."""
    buffer_bytes: float = 0.0
    """Bytes of the communicators, which the allocator does not count."""

    @property
    def can_fit(self) -> bool:
        """Whether the needed bytes are available."""
        return self.needed_bytes <= self.available_bytes

    @property
    def needed_bytes(self) -> float:
        """Bytes of the peak, fragmentation and communicators."""
        return _get_needed_bytes(self.memory, self.buffer_bytes)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
        return self.step_time.tokens / self.step_time.total_seconds

    def compute_mfu(self, chip: Chip) -> float:
        """Return the model FLOPs utilisation: fraction of the chips' dense half-precision peak."""
        return self.step_time.flops / self.step_time.total_seconds / (chip.half_tflops * 1e12 * self.setup.world_size)


def get_unavailable_gib(chip: Chip) -> float:
    """Return the GiB of the reported memory that a job cannot use; an NPU does not report its reserved part (a 910B3
    of 64 GiB reports 60.97)."""
    return IDLE_DEVICE_GIB["NVIDIA"] if chip.name.startswith("NVIDIA") else 0.0


def get_available_bytes(chip: Chip) -> float:
    """Return the bytes of a chip that are available to a job."""
    idle_gib = next((gib for name, gib in IDLE_DEVICE_GIB.items() if chip.name.startswith(name)), 0.0)
    return (chip.memory_gib - (idle_gib if chip.taken_gib is None else chip.taken_gib)) * 2**30


def estimate_strategy(setup: TrainingSetup, chip: Chip) -> StrategyEstimate:
    """Estimate memory and time of a setup on a chip."""
    return _complete_estimate(setup, estimate_peak_memory(setup), chip)


def _complete_estimate(setup: TrainingSetup, memory: PeakMemory, chip: Chip) -> StrategyEstimate:
    return StrategyEstimate(
        setup,
        memory,
        estimate_step_time(setup, cost_model.get_chip_rates(chip)),
        get_available_bytes(chip),
        estimate_buffer_bytes(setup, chip),
    )


def estimate_buffer_bytes(setup: TrainingSetup, chip: Chip) -> float:
    """Return the bytes of the communicators: one of all ranks, and one of each group of the mesh that this rank is in
    (`parallel/mesh.py`)."""
    if setup.world_size == 1 or not chip.name.startswith("Ascend"):
        return 0.0
    world, groups = setup.world_size, 1
    if setup.pipeline > 1:
        sizes = (setup.pipeline, setup.ranks, setup.context, setup.tensor)
        groups += sum(1 < size < world for size in sizes) + (setup.ranks > 1 < setup.context)
    elif setup.tensor > 1 or setup.context > 1 or setup.replicate > 1 or setup.expert > 1:
        parts = (setup.tensor, setup.context, setup.replicate, setup.ranks // setup.replicate // setup.expert)
        groups += sum(1 < size < world for size in parts)  # dimensions, then several of them together
        groups += sum(size > 1 for size in parts[:2]) > 1 and 1 < setup.gradient_ranks < world
        groups += setup.replicate > 1 and 1 < setup.ranks < world
        groups += setup.replicate > 1 and setup.context > 1
        groups += 2 * (setup.expert > 1)  # the expert ranks, and those that hold the same experts
    return COMMUNICATOR_BYTES * groups


def get_max_tokens(chip: Chip) -> int:
    """Return the maximum useful tokens of a micro-batch."""
    return _MAX_CPU_TOKENS if chip.name == PROCESSOR_NAME else _MAX_DEVICE_TOKENS


def find_largest_power_of_two(setup: TrainingSetup, chip: Chip, tokens_per_rank: int) -> int:
    """Return the largest power of two of tokens that fits with headroom, at least one segment.

    Args:
        tokens_per_rank: tokens of a rank in a step.
    """
    budget = get_available_bytes(chip) * HEADROOM[get_device_row(chip).kernels]
    size = 1 << (get_max_tokens(chip).bit_length() - 1)
    while size > setup.min_micro_batch:
        candidate = replace(setup, micro_tokens=size, micro_steps=max(1, tokens_per_rank // size))
        if _get_needed_bytes(estimate_peak_memory(candidate), estimate_buffer_bytes(candidate, chip)) <= budget:
            return size
        size //= 2
    return setup.min_micro_batch


def iter_micro_batches(setup: TrainingSetup, global_tokens: int, chip: Chip) -> Iterator[TrainingSetup]:
    """Yield the splits of a global batch: segments times powers of two that divide the tokens of a rank, the largest
    first."""
    tokens_per_rank = max(global_tokens // setup.ranks, setup.min_micro_batch)
    size = setup.min_micro_batch
    sizes = []
    while size <= min(tokens_per_rank, max(get_max_tokens(chip), setup.min_micro_batch)):
        if tokens_per_rank % size == 0:
            sizes.append(size)
        size *= 2
    for micro_tokens in reversed(sizes or [tokens_per_rank]):
        yield _with_micro_batch(setup, global_tokens, micro_tokens)


def _with_micro_batch(setup: TrainingSetup, global_tokens: int, micro_tokens: int) -> TrainingSetup:
    return replace(setup, micro_tokens=micro_tokens, micro_steps=max(1, global_tokens // setup.ranks // micro_tokens))


def choose_micro_batch(setup: TrainingSetup, global_tokens: int, chip: Chip) -> StrategyEstimate:
    """Return the estimate with the largest micro-batch that fits, of a pipeline, which smaller ones fill better, with
    the fastest; if none fits, with the smallest."""
    choice = None
    fitting = []
    for candidate in iter_micro_batches(setup, global_tokens, chip):
        choice = estimate_strategy(candidate, chip)
        if choice.can_fit:
            fitting.append(choice)
            if setup.pipeline == 1:
                break
    assert choice is not None
    return max(fitting, key=lambda estimate: estimate.tokens_per_s, default=choice)


def list_fitting(
    setup: TrainingSetup, global_tokens: int, chip: Chip, micro_tokens: int | None = None
) -> list[StrategyEstimate]:
    """Return every strategy and recomputation with every micro-batch that fits.

    Args:
        micro_tokens: tokens of the micro-batch, where they are given.
    """
    return [
        choice for group in estimate_all(setup, global_tokens, chip, micro_tokens) for choice in group if choice.can_fit
    ]


def find_fastest(setup: TrainingSetup, global_tokens: int, chip: Chip) -> StrategyEstimate | None:
    """Return the fastest strategy, recomputation and micro-batch that fit; None: nothing does.

    Of micro-batches the two largest that fit are compared, for a pipeline all: smaller ones fill it better.
    """
    if setup.ranks * setup.min_micro_batch > global_tokens:
        return None
    found: list[StrategyEstimate] = []
    for base in list_strategies(setup, chip):
        fitting = 0
        for candidate in iter_micro_batches(base, global_tokens, chip):
            memory = estimate_peak_memory(candidate)
            if _get_needed_bytes(memory, estimate_buffer_bytes(candidate, chip)) > get_available_bytes(chip):
                continue
            found.append(_complete_estimate(candidate, memory, chip))
            fitting += 1
            if fitting == 2 and base.pipeline == 1:
                break
    return max(found, key=lambda estimate: estimate.tokens_per_s, default=None)


def pick_fastest(choices: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    """Return the fastest estimate of each strategy, the fastest first."""
    best: dict[tuple[str | bool | int, ...], StrategyEstimate] = {}
    for choice in choices:
        key = get_strategy_key(choice.setup)
        if key not in best or choice.tokens_per_s > best[key].tokens_per_s:
            best[key] = choice
    return sorted(best.values(), key=lambda choice: -choice.tokens_per_s)


def find_pareto_frontier(choices: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    """Return the Pareto frontier of speed and memory, the least memory first."""
    frontier: list[StrategyEstimate] = []
    for choice in sorted(choices, key=lambda choice: (choice.needed_bytes, -choice.tokens_per_s)):
        if not frontier or choice.tokens_per_s > frontier[-1].tokens_per_s:
            frontier.append(choice)
    return frontier


def get_strategy_key(setup: TrainingSetup) -> tuple[str | bool | int, ...]:
    """Return (strategy, offload, recompute, dimensions of the mesh); a single device counts as `ddp`."""
    strategy = "ddp" if setup.strategy == "single" else setup.strategy
    layout = (setup.pipeline, setup.replicate, setup.context, setup.expert, setup.tensor)
    return (strategy, setup.offload, setup.recompute, *layout)


def estimate_all(
    setup: TrainingSetup, global_tokens: int, chip: Chip, micro_tokens: int | None = None
) -> list[list[StrategyEstimate]]:
    """Return every strategy with all its micro-batches, the largest first; arguments as for `list_fitting`."""
    groups = []
    for base in list_strategies(setup, chip):
        candidates = (
            iter_micro_batches(base, global_tokens, chip)
            if micro_tokens is None
            else [_with_micro_batch(base, global_tokens, micro_tokens)]
        )
        groups.append([estimate_strategy(candidate, chip) for candidate in candidates])
    return groups


def pick_micro_batches(
    setup: TrainingSetup, global_tokens: int, chip: Chip, micro_tokens: int | None = None
) -> list[StrategyEstimate]:
    """Return every strategy with its fastest micro-batch that fits; if none does, with the smallest.

    Args:
        micro_tokens: tokens of the micro-batch, if they are set.
    """
    picked = []
    for choices in estimate_all(setup, global_tokens, chip, micro_tokens):
        fitting = [choice for choice in choices if choice.can_fit]
        picked.append(max(fitting, key=lambda choice: choice.tokens_per_s) if fitting else choices[-1])
    return picked


def list_strategies(setup: TrainingSetup, chip: Chip) -> list[TrainingSetup]:
    """Return the setup with every possible strategy and recomputation; quantized weights are not sharded."""
    strategies: list[tuple[StrategyName, bool]] = [("single", False)]
    if setup.gradient_ranks > 1:
        strategies = [("ddp", False)] if setup.replicate == 1 else []
        if setup.quantize == "none":
            strategies += [("zero2", False), ("zero3", False)]
            strategies += [("zero3", True)] * (chip.name != PROCESSOR_NAME and setup.pipeline == 1)
    return [
        replace(setup, strategy=strategy, offload=offload, recompute=recompute)
        for strategy, offload in strategies
        for recompute in typing.get_args(Recompute)
    ]


def find_bottleneck(choice: StrategyEstimate) -> str:
    """Return the bottleneck: the largest part of the peak if memory is short, else the slowest part of the step."""
    if not choice.can_fit:
        part = max(choice.memory.parts, key=lambda name: choice.memory.parts[name])
        return f"memory: {part}, at {choice.memory.moment}"
    parts = {
        "the chip's arithmetic and memory": choice.step_time.compute - choice.step_time.update,
        "the update": choice.step_time.update,
        "launches from the host": choice.step_time.launches,
        "stages that wait for each other": choice.step_time.waiting,
    }
    slowest = max(parts, key=lambda name: parts[name])
    return "collectives" if choice.step_time.exposed_collectives > parts[slowest] else slowest
