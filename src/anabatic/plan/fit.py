"""What of a job fits on a chip, and which of the settings that fit is fastest."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from anabatic.config.parallel import Recompute
from anabatic.device.table import PROCESSOR, Chip, row_of
from anabatic.plan import cost
from anabatic.plan.clock import Clock, clock
from anabatic.plan.memory import Memory, memory
from anabatic.plan.setup import Setup, Strategy

TAKEN = {"Ascend": 3.3, "NVIDIA": 0.7}
"""GiB that a device holds before the first tensor: `npu-smi info` of idle 910B3 cards shows 3,314 MiB; a CUDA context
of a recent driver. Others: nothing."""
FRAGMENTS = 0.04
"""Share of the peak that the allocator holds and cannot use, with expandable segments: an assumption."""
COMMUNICATOR = 2.0 * 200 * 2**20
"""Bytes that each communicator of an NPU takes: twice HCCL_BUFFSIZE, whose default is 200 MB (HCCL documentation)."""
_MOST_TOKENS = 1 << 18
_MOST_NEAR = 4096
"""On a processor: larger micro-batches leave its caches and were slower (docs/dev/LOG.md)."""
HEADROOM = {"npu": 0.9, "cpu": 0.9, "reference": 0.7}
"""Share of the room that a micro-batch nobody asked for may fill, by the operators' implementation: the plan's counts
were compared with allocators for the first two; the plain ones keep more."""


@dataclass(frozen=True)
class Choice:
    """A setting, and what it needs."""

    setup: Setup
    memory: Memory
    clock: Clock
    room: float
    """Bytes that the device has for it."""
    buffers: float = 0.0
    """Bytes of the ranks' communicators, which the allocator does not know of."""

    @property
    def fits(self) -> bool:
        """The peak and its fragments are within the room."""
        return self.needs <= self.room

    @property
    def needs(self) -> float:
        """The peak, what the allocator loses, and what lies beside it."""
        return self.memory.total * (1 + FRAGMENTS) + self.buffers

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.clock.tokens / self.clock.step

    def mfu(self, chip: Chip) -> float:
        """Model FLOPs utilisation: share of the chips' dense half-precision peak."""
        return self.clock.flops / self.clock.step / (chip.half_tflops * 1e12 * self.setup.world)


def beside(chip: Chip) -> float:
    """Return the GiB of the memory that a device reports which a job does not get: an NPU does not report its own share
    (a 910B3 of 64 GiB says 60.97)."""
    return TAKEN["NVIDIA"] if chip.name.startswith("NVIDIA") else 0.0


def room(chip: Chip) -> float:
    """Return the bytes that a job has on a chip."""
    usual = next((gib for name, gib in TAKEN.items() if chip.name.startswith(name)), 0.0)
    return (chip.memory_gib - (usual if chip.taken_gib is None else chip.taken_gib)) * 2**30


def judge(setup: Setup, chip: Chip) -> Choice:
    """Return what a setting needs on a chip."""
    return Choice(setup, memory(setup), clock(setup, cost.rates(chip)), room(chip), buffers(setup, chip))


def buffers(setup: Setup, chip: Chip) -> float:
    """Return the bytes of the communicators: all ranks', with tensor ranks those of rows and columns too."""
    if setup.world == 1 or not chip.name.startswith("Ascend"):
        return 0.0
    return COMMUNICATOR * (1 if setup.tensor == 1 else 3)


def most_tokens(chip: Chip) -> int:
    """Return the tokens of a micro-batch beyond which nothing is gained."""
    return _MOST_NEAR if chip.name == PROCESSOR else _MOST_TOKENS


def power_that_fits(setup: Setup, chip: Chip, share: int) -> int:
    """Return the largest power of two of tokens that fits with some headroom; at least a segment.

    Args:
        share: tokens of a rank in a step.
    """
    place = room(chip) * HEADROOM[row_of(chip).kernels]
    size = 1 << (most_tokens(chip).bit_length() - 1)
    while size > setup.least:
        one = replace(setup, micro_tokens=size, micro_steps=max(1, share // size))
        if memory(one).total * (1 + FRAGMENTS) + buffers(one, chip) <= place:
            return size
        size //= 2
    return setup.least


def micro_batches(setup: Setup, global_tokens: int, chip: Chip) -> Iterator[Setup]:
    """Ways to cut a global batch: powers of two of segments that divide a rank's share, the largest first."""
    share = max(global_tokens // setup.ranks, setup.least)
    size = setup.least
    sizes = []
    while size <= min(share, max(most_tokens(chip), setup.least)):
        if share % size == 0:
            sizes.append(size)
        size *= 2
    for one in reversed(sizes or [share]):
        yield _of_size(setup, global_tokens, one)


def _of_size(setup: Setup, global_tokens: int, micro: int) -> Setup:
    return replace(setup, micro_tokens=micro, micro_steps=max(1, global_tokens // setup.ranks // micro))


def largest(setup: Setup, global_tokens: int, chip: Chip) -> Choice:
    """Return the way with the largest micro-batch that fits; where none does, the smallest."""
    choice = None
    for one in micro_batches(setup, global_tokens, chip):
        choice = judge(one, chip)
        if choice.fits:
            break
    assert choice is not None
    return choice


def fitting(setup: Setup, global_tokens: int, chip: Chip, micro: int | None = None) -> list[Choice]:
    """Return every strategy and way of recomputation with every micro-batch that fits.

    Args:
        micro: tokens of the micro-batch, where they are given.
    """
    return [one for choices in tried(setup, global_tokens, chip, micro) for one in choices if one.fits]


def fastest(choices: Iterable[Choice]) -> list[Choice]:
    """Return the fastest of each way, the fastest first."""
    best: dict[tuple[str, bool, str], Choice] = {}
    for one in choices:
        key = way_of(one.setup)
        if key not in best or one.tokens_per_s > best[key].tokens_per_s:
            best[key] = one
    return sorted(best.values(), key=lambda one: -one.tokens_per_s)


def frontier(choices: Iterable[Choice]) -> list[Choice]:
    """Return those that no other outruns with as little memory, the least memory first."""
    found: list[Choice] = []
    for one in sorted(choices, key=lambda one: (one.needs, -one.tokens_per_s)):
        if not found or one.tokens_per_s > found[-1].tokens_per_s:
            found.append(one)
    return found


def way_of(setup: Setup) -> tuple[str, bool, str]:
    """Return what makes a way; one device alone is what several are under `ddp`."""
    return ("ddp" if setup.strategy == "single" else setup.strategy), setup.offload, setup.recompute


def tried(setup: Setup, global_tokens: int, chip: Chip, micro: int | None = None) -> list[list[Choice]]:
    """Return every way with all its micro-batches, the largest first; arguments as of `fitting`."""
    found = []
    for base in ways(setup, chip):
        sizes = micro_batches(base, global_tokens, chip) if micro is None else [_of_size(base, global_tokens, micro)]
        found.append([judge(one, chip) for one in sizes])
    return found


def cut(setup: Setup, global_tokens: int, chip: Chip, micro: int | None = None) -> list[Choice]:
    """Return every way with its fastest micro-batch that fits; where none does, with the smallest.

    Args:
        micro: tokens of the micro-batch, where they are given.
    """
    found = []
    for choices in tried(setup, global_tokens, chip, micro):
        fitting = [one for one in choices if one.fits]
        found.append(max(fitting, key=lambda one: one.tokens_per_s) if fitting else choices[-1])
    return found


def ways(setup: Setup, chip: Chip) -> list[Setup]:
    """Return the job with every strategy and way of recomputation that it can have; packed weights are not divided."""
    strategies: list[tuple[Strategy, bool]] = [("single", False)]
    if setup.ranks > 1:
        strategies = [("ddp", False)]
        if setup.quantize == "none":
            strategies += [("zero2", False), ("zero3", False)]
            strategies += [("zero3", True)] * (chip.name != PROCESSOR)
    return [
        replace(setup, strategy=strategy, offload=offload, recompute=recompute)
        for strategy, offload in strategies
        for recompute in typing.get_args(Recompute)
    ]


def binding(choice: Choice) -> str:
    """Name what decides: the largest part of the peak where memory is short, else what the step waits for."""
    if not choice.fits:
        part = max(choice.memory.parts, key=lambda name: choice.memory.parts[name])
        return f"memory: {part}, at {choice.memory.moment}"
    parts = {
        "the chip's arithmetic and memory": choice.clock.compute - choice.clock.update,
        "the update": choice.clock.update,
        "launches from the host": choice.clock.host,
    }
    slowest = max(parts, key=lambda name: parts[name])
    return "collectives" if choice.clock.exposed > parts[slowest] else slowest
