"""What of a job fits on a chip, and which of the settings that fit is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from anabatic.device.table import Chip
from anabatic.plan import cost
from anabatic.plan.clock import Clock, clock
from anabatic.plan.memory import Memory, memory
from anabatic.plan.setup import Setup

TAKEN = {"Ascend": 3.3, "NVIDIA": 0.7}
"""GiB that a device holds before the first tensor: `npu-smi info` of idle 910B3 cards shows 3,314 MiB; a CUDA context
of a recent driver. Others: nothing."""
FRAGMENTS = 0.04
"""Share of the peak that the allocator holds and cannot use, with expandable segments: an assumption."""
_MOST_TOKENS = 1 << 18


@dataclass(frozen=True)
class Choice:
    """A setting, and what it needs."""

    setup: Setup
    memory: Memory
    clock: Clock
    room: float
    """Bytes that the device has for it."""

    @property
    def fits(self) -> bool:
        """The peak and its fragments are within the room."""
        return self.needs <= self.room

    @property
    def needs(self) -> float:
        """The peak and what the allocator loses."""
        return self.memory.total * (1 + FRAGMENTS)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.clock.tokens / self.clock.step

    def mfu(self, chip: Chip) -> float:
        """Model FLOPs utilisation: share of the chips' dense half-precision peak."""
        return self.clock.flops / self.clock.step / (chip.half_tflops * 1e12 * self.setup.world)


def room(chip: Chip) -> float:
    """Return the bytes that a job has on a chip."""
    usual = next((gib for name, gib in TAKEN.items() if chip.name.startswith(name)), 0.0)
    return (chip.memory_gib - (usual if chip.taken_gib is None else chip.taken_gib)) * 2**30


def judge(setup: Setup, chip: Chip) -> Choice:
    """Return what a setting needs on a chip."""
    return Choice(setup, memory(setup), clock(setup, cost.rates(chip)), room(chip))


def micro_batches(setup: Setup, global_tokens: int) -> Iterator[Setup]:
    """Ways to cut a global batch: powers of two of segments that divide a rank's share, the largest first."""
    share = max(global_tokens // setup.ranks, setup.seq_len)
    size = setup.seq_len
    sizes = []
    while size <= min(share, _MOST_TOKENS):
        if share % size == 0:
            sizes.append(size)
        size *= 2
    for one in reversed(sizes or [share]):
        yield replace(setup, micro_tokens=one, micro_steps=max(1, share // one))


def largest(setup: Setup, global_tokens: int, chip: Chip) -> Choice:
    """Return the way with the largest micro-batch that fits; where none does, the smallest."""
    choice = None
    for one in micro_batches(setup, global_tokens):
        choice = judge(one, chip)
        if choice.fits:
            break
    assert choice is not None
    return choice


def alternatives(setup: Setup, global_tokens: int, chip: Chip) -> list[Choice]:
    """Return every strategy and way of recomputation with its fastest micro-batch that fits, the fastest first."""
    found = []
    for strategy, offload in _strategies(setup):
        for recompute in ("none", "selective", "full"):
            base = replace(setup, strategy=strategy, offload=offload, recompute=recompute)  # type: ignore[arg-type]
            fitting = [one for one in map(lambda s: judge(s, chip), micro_batches(base, global_tokens)) if one.fits]
            if fitting:
                found.append(max(fitting, key=lambda one: one.tokens_per_s))
    return sorted(found, key=lambda one: -one.tokens_per_s)


def _strategies(setup: Setup) -> list[tuple[str, bool]]:
    if setup.ranks == 1:
        return [("single", False)]
    return [("ddp", False), ("zero2", False), ("zero3", False), ("zero3", True)]


def binding(choice: Choice) -> str:
    """Name what decides: the largest part of the peak where memory is short, else what the step waits for."""
    if not choice.fits:
        part = max(choice.memory.parts, key=lambda name: choice.memory.parts[name])
        return f"memory: {part}, at {choice.memory.moment}"
    parts = {
        "the chip's arithmetic and memory": choice.clock.compute,
        "launches from the host": choice.clock.host,
    }
    slowest = max(parts, key=lambda name: parts[name])
    return "collectives" if choice.clock.exposed > parts[slowest] else slowest
