"""What of a job fits on a chip, and which of the settings that fit is fastest."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from anabatic.config.sections.parallel import Recompute
from anabatic.device.table import PROCESSOR_NAME, Chip, get_device_row
from anabatic.plan import cost_model
from anabatic.plan.memory_estimate import PeakMemory, estimate_peak_memory
from anabatic.plan.step_time import StepTime, estimate_step_time
from anabatic.plan.training_setup import StrategyName, TrainingSetup

IDLE_DEVICE_GIB = {"Ascend": 3.3, "NVIDIA": 0.7}
"""GiB that a device holds before the first tensor: `npu-smi info` of idle 910B3 cards shows 3,314 MiB; a CUDA context
of a recent driver. Others: nothing."""
FRAGMENTATION = 0.04
"""Share of the peak that the allocator holds and cannot use, with expandable segments: an assumption."""
COMMUNICATOR_BYTES = 2.0 * 200 * 2**20
"""Bytes that each communicator of an NPU takes: twice HCCL_BUFFSIZE, whose default is 200 MB (HCCL documentation)."""
_MAX_DEVICE_TOKENS = 1 << 18
_MAX_CPU_TOKENS = 4096
"""On a processor: larger micro-batches leave its caches and were slower (docs/dev)."""
HEADROOM = {"npu": 0.9, "cpu": 0.9, "reference": 0.7}
"""Share of the room that a micro-batch nobody asked for may fill, by the operators' implementation: the plan's counts
were compared with allocators for the first two; the plain ones keep more."""


@dataclass(frozen=True)
class StrategyEstimate:
    """A setting, and what it needs."""

    setup: TrainingSetup
    memory: PeakMemory
    step_time: StepTime
    available_bytes: float
    """Bytes that the device has for it."""
    buffer_bytes: float = 0.0
    """Bytes of the ranks' communicators, which the allocator does not know of."""

    @property
    def can_fit(self) -> bool:
        """The peak and its fragments are within the room."""
        return self.needed_bytes <= self.available_bytes

    @property
    def needed_bytes(self) -> float:
        """The peak, what the allocator loses, and what lies beside it."""
        return self.memory.total * (1 + FRAGMENTATION) + self.buffer_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.step_time.tokens / self.step_time.total_seconds

    def compute_mfu(self, chip: Chip) -> float:
        """Model FLOPs utilisation: share of the chips' dense half-precision peak."""
        return self.step_time.flops / self.step_time.total_seconds / (chip.half_tflops * 1e12 * self.setup.world_size)


def get_unavailable_gib(chip: Chip) -> float:
    """Return the GiB of the memory that a device reports which a job does not get: an NPU does not report its own share
    (a 910B3 of 64 GiB says 60.97)."""
    return IDLE_DEVICE_GIB["NVIDIA"] if chip.name.startswith("NVIDIA") else 0.0


def get_available_bytes(chip: Chip) -> float:
    """Return the bytes that a job has on a chip."""
    usual = next((gib for name, gib in IDLE_DEVICE_GIB.items() if chip.name.startswith(name)), 0.0)
    return (chip.memory_gib - (usual if chip.taken_gib is None else chip.taken_gib)) * 2**30


def estimate_strategy(setup: TrainingSetup, chip: Chip) -> StrategyEstimate:
    """Return what a setting needs on a chip."""
    return StrategyEstimate(
        setup,
        estimate_peak_memory(setup),
        estimate_step_time(setup, cost_model.get_chip_rates(chip)),
        get_available_bytes(chip),
        estimate_buffer_bytes(setup, chip),
    )


def estimate_buffer_bytes(setup: TrainingSetup, chip: Chip) -> float:
    """Return the bytes of the communicators: all ranks', with tensor ranks those of rows and columns too."""
    if setup.world_size == 1 or not chip.name.startswith("Ascend"):
        return 0.0
    return COMMUNICATOR_BYTES * (1 if setup.tensor == 1 else 3)


def get_max_tokens(chip: Chip) -> int:
    """Return the tokens of a micro-batch beyond which nothing is gained."""
    return _MAX_CPU_TOKENS if chip.name == PROCESSOR_NAME else _MAX_DEVICE_TOKENS


def find_largest_power_of_two(setup: TrainingSetup, chip: Chip, share: int) -> int:
    """Return the largest power of two of tokens that fits with some headroom; at least a segment.

    Args:
        share: tokens of a rank in a step.
    """
    place = get_available_bytes(chip) * HEADROOM[get_device_row(chip).kernels]
    size = 1 << (get_max_tokens(chip).bit_length() - 1)
    while size > setup.min_micro_batch:
        one = replace(setup, micro_tokens=size, micro_steps=max(1, share // size))
        if estimate_peak_memory(one).total * (1 + FRAGMENTATION) + estimate_buffer_bytes(one, chip) <= place:
            return size
        size //= 2
    return setup.min_micro_batch


def iter_micro_batches(setup: TrainingSetup, global_tokens: int, chip: Chip) -> Iterator[TrainingSetup]:
    """Ways to cut a global batch: powers of two of segments that divide a rank's share, the largest first."""
    share = max(global_tokens // setup.ranks, setup.min_micro_batch)
    size = setup.min_micro_batch
    sizes = []
    while size <= min(share, max(get_max_tokens(chip), setup.min_micro_batch)):
        if share % size == 0:
            sizes.append(size)
        size *= 2
    for one in reversed(sizes or [share]):
        yield _with_micro_batch(setup, global_tokens, one)


def _with_micro_batch(setup: TrainingSetup, global_tokens: int, micro: int) -> TrainingSetup:
    return replace(setup, micro_tokens=micro, micro_steps=max(1, global_tokens // setup.ranks // micro))


def find_largest_micro_batch(setup: TrainingSetup, global_tokens: int, chip: Chip) -> StrategyEstimate:
    """Return the way with the largest micro-batch that fits; where none does, the smallest."""
    choice = None
    for one in iter_micro_batches(setup, global_tokens, chip):
        choice = estimate_strategy(one, chip)
        if choice.can_fit:
            break
    assert choice is not None
    return choice


def list_fitting(
    setup: TrainingSetup, global_tokens: int, chip: Chip, micro: int | None = None
) -> list[StrategyEstimate]:
    """Return every strategy and way of recomputation with every micro-batch that fits.

    Args:
        micro: tokens of the micro-batch, where they are given.
    """
    return [one for choices in estimate_all(setup, global_tokens, chip, micro) for one in choices if one.can_fit]


def pick_fastest(choices: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    """Return the fastest of each way, the fastest first."""
    best: dict[tuple[str, bool, str], StrategyEstimate] = {}
    for one in choices:
        key = get_strategy_key(one.setup)
        if key not in best or one.tokens_per_s > best[key].tokens_per_s:
            best[key] = one
    return sorted(best.values(), key=lambda one: -one.tokens_per_s)


def find_pareto_frontier(choices: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    """Return those that no other outruns with as little memory, the least memory first."""
    found: list[StrategyEstimate] = []
    for one in sorted(choices, key=lambda one: (one.needed_bytes, -one.tokens_per_s)):
        if not found or one.tokens_per_s > found[-1].tokens_per_s:
            found.append(one)
    return found


def get_strategy_key(setup: TrainingSetup) -> tuple[str, bool, str]:
    """Return what makes a way; one device alone is what several are under `ddp`."""
    return ("ddp" if setup.strategy == "single" else setup.strategy), setup.offload, setup.recompute


def estimate_all(
    setup: TrainingSetup, global_tokens: int, chip: Chip, micro: int | None = None
) -> list[list[StrategyEstimate]]:
    """Return every way with all its micro-batches, the largest first; arguments as of `list_fitting`."""
    found = []
    for base in list_strategies(setup, chip):
        sizes = (
            iter_micro_batches(base, global_tokens, chip)
            if micro is None
            else [_with_micro_batch(base, global_tokens, micro)]
        )
        found.append([estimate_strategy(one, chip) for one in sizes])
    return found


def pick_micro_batches(
    setup: TrainingSetup, global_tokens: int, chip: Chip, micro: int | None = None
) -> list[StrategyEstimate]:
    """Return every way with its fastest micro-batch that fits; where none does, with the smallest.

    Args:
        micro: tokens of the micro-batch, where they are given.
    """
    found = []
    for choices in estimate_all(setup, global_tokens, chip, micro):
        fitting = [one for one in choices if one.can_fit]
        found.append(max(fitting, key=lambda one: one.tokens_per_s) if fitting else choices[-1])
    return found


def list_strategies(setup: TrainingSetup, chip: Chip) -> list[TrainingSetup]:
    """Return the job with every strategy and way of recomputation that it can have; packed weights are not divided."""
    strategies: list[tuple[StrategyName, bool]] = [("single", False)]
    if setup.ranks > 1:
        strategies = [("ddp", False)]
        if setup.quantize == "none":
            strategies += [("zero2", False), ("zero3", False)]
            strategies += [("zero3", True)] * (chip.name != PROCESSOR_NAME)
    return [
        replace(setup, strategy=strategy, offload=offload, recompute=recompute)
        for strategy, offload in strategies
        for recompute in typing.get_args(Recompute)
    ]


def find_bottleneck(choice: StrategyEstimate) -> str:
    """Name what decides: the largest part of the peak where memory is short, else what the step waits for."""
    if not choice.can_fit:
        part = max(choice.memory.parts, key=lambda name: choice.memory.parts[name])
        return f"memory: {part}, at {choice.memory.moment}"
    parts = {
        "the chip's arithmetic and memory": choice.step_time.compute - choice.step_time.update,
        "the update": choice.step_time.update,
        "launches from the host": choice.step_time.launches,
    }
    slowest = max(parts, key=lambda name: parts[name])
    return "collectives" if choice.step_time.exposed_collectives > parts[slowest] else slowest
