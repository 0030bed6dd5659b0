"""What `anabatic plan` prints: tables for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anabatic.core.text import count, duration
from anabatic.device.table import Chip
from anabatic.plan import fit
from anabatic.plan.around import DISK, Around
from anabatic.plan.fit import FRAGMENTS, Choice, binding
from anabatic.plan.setup import Setup

_BAR = 30


@dataclass(frozen=True)
class Plan:
    """A job on paper.

    Attributes:
        source: where the shape is from.
        choice: the job as it stands; fitting: all ways and micro-batches that fit.
        steps: of the run; 0: not known without the data.
        assumed: what was not given.
        around: what the run needs beside its devices.
        said: what says which devices these are, where the user has not.
    """

    source: str
    chip: Chip
    npus: int
    nodes: int
    choice: Choice
    fitting: list[Choice]
    steps: int
    assumed: list[str]
    around: Around
    said: str = ""

    @property
    def others(self) -> list[Choice]:
        """The fastest micro-batch of each way, the fastest first."""
        return fit.fastest(self.fitting)


def gib(number: float) -> str:
    """`12.34`, in GiB."""
    return f"{number / 2**30:.2f}"


def way(setup: Setup) -> str:
    """The settings of a choice, in a line."""
    words = [setup.strategy + (", offload" if setup.offload else "")]
    if setup.tensor > 1:
        words.append(f"tensor {setup.tensor}")
    words.append(f"recompute {setup.recompute}")
    words.append(f"micro-batch {setup.micro_tokens:,} x {setup.micro_steps}")
    return ", ".join(words)


def options(setup: Setup, model: bool) -> str:
    """The same as options of a command; `model`: of one that builds its model."""
    recompute = "model.recompute" if model else "recompute"
    words = f"--parallel.strategy {setup.strategy} --{recompute} {setup.recompute}"
    words += f" --batch.micro-batch-tokens {setup.micro_tokens}"
    return words + (" --parallel.offload cpu" if setup.offload else "")


def lines(plan: Plan, model: bool) -> Iterator[str]:
    """The plan for people.

    Args:
        model: the job's model is a section of its own (`pretrain`).
    """
    setup, shape, choice = plan.choice.setup, plan.choice.setup.shape, plan.choice
    trained = f"LoRA r {setup.rank}, {count(setup.trained)} trained" if setup.tuner == "lora" else f"{setup.tuner}"
    yield f"{count(shape.params)} parameters: {shape.layers} blocks of width {shape.hidden} ({plan.source}); {trained}"
    machines = f"{plan.nodes} x {plan.npus}" if plan.nodes > 1 else f"{plan.npus}"
    said = f" ({plan.said})" if plan.said else ""
    room = f"{plan.chip.memory_gib:.4g} GiB, {gib(choice.room)} for a job"
    yield f"{machines} x {plan.chip.name}{said}, {room}; {way(setup)}"
    yield from (f"  assumed: {line}" for line in plan.assumed)
    yield ""
    yield from _memory(choice)
    yield ""
    yield from _time(plan)
    yield from _advice(plan, model)


def _memory(choice: Choice) -> Iterator[str]:
    unit, factor = ("GiB", 1) if choice.needs >= 2**30 else ("MiB", 1024)
    yield f"Memory of a device, {unit}, when it is highest: {choice.memory.moment}"
    for name, size in choice.memory.parts.items():
        if size >= 0.005 * 2**30 / factor:
            bar = "#" * max(1, round(_BAR * size / max(choice.room, choice.needs)))
            yield f"  {name:24}{gib(factor * size):>8}  {bar}"
        if name == "activations":
            shown = {kind: of for kind, of in choice.memory.kinds.items() if of >= 0.005 * 2**30 / factor}
            yield from (f"    {kind:22}{gib(factor * of):>8}" for kind, of in shown.items() if len(shown) > 1)
    yield f"  {'fragments, assumed':24}{gib(factor * FRAGMENTS * choice.memory.total):>8}"
    if choice.buffers:
        yield f"  {'communication buffers':24}{gib(factor * choice.buffers):>8}"
    over = choice.needs - choice.room
    verdict = f"{gib(-factor * over)} left" if choice.fits else f"{gib(factor * over)} TOO MUCH"
    yield f"  {'all':24}{gib(factor * choice.needs):>8}  {verdict}"


def _time(plan: Plan) -> Iterator[str]:
    choice, clock = plan.choice, plan.choice.clock
    yield f"A step of {clock.tokens:,} tokens: {_seconds(clock.step)}, {choice.tokens_per_s:,.0f} tokens/s,"
    yield f"  {choice.mfu(plan.chip):.0%} of the chips' peak; what decides: {binding(choice)}"
    yield f"  device {_seconds(clock.compute)} (update {_seconds(clock.update)}), launches {_seconds(clock.host)},"
    yield f"  collectives {_seconds(clock.traffic)}, of which {_seconds(clock.exposed)} are waited for"
    if plan.steps:
        tokens, seconds = count(plan.steps * clock.tokens), duration(plan.steps * clock.step)
        yield f"The run: {plan.steps:,} steps, {tokens} tokens, {seconds}{_energy(plan)}"
    yield from _beside(plan)


def _energy(plan: Plan) -> str:
    if plan.around.kwh is None:
        return "" if plan.chip.watts else "; energy: no power of this chip is published"
    return f"; at most {plan.around.kwh:,.4g} kWh, the devices' {plan.chip.watts} W all the time"


def _beside(plan: Plan) -> Iterator[str]:
    found = plan.around
    word = "adapter" if plan.choice.setup.tuner == "lora" else "model"
    yield (
        f"A checkpoint: {gib(found.checkpoint)} GiB, {_seconds(found.checkpoint / DISK)} to write at an assumed"
        f" {DISK / 1e9:g} GB/s; the saved {word}: {gib(found.model)} GiB"
    )
    for name, parts in (("Memory of each host", found.host), ("Disk", found.disk)):
        told = ", ".join(f"{part} {gib(size)}" for part, size in parts.items())
        yield f"{name}, GiB: {gib(sum(parts.values()))} ({told})"


def _advice(plan: Plan, model: bool) -> Iterator[str]:
    if not plan.fitting:
        yield ""
        yield "Nothing that was tried fits: more devices, a chip with more memory, LoRA, or a shorter batch.seq_len."
        return
    best = plan.others[0]
    gain = best.tokens_per_s / plan.choice.tokens_per_s
    if plan.choice.fits and gain < 1.05:
        yield "No other strategy, recomputation or micro-batch that fits is more than 5 % faster."
        return
    yield ""
    yield f"{'Fits' if not plan.choice.fits else f'{gain:.2f}x as fast'}: {options(best.setup, model)}"
    yield f"  {gib(best.needs)} GiB, {best.tokens_per_s:,.0f} tokens/s"


def sweep(plan: Plan) -> Iterator[str]:
    """Every way that fits with its fastest micro-batch, and the whole frontier, the fastest first."""
    best, frontier = plan.others, fit.frontier(plan.fitting)
    fastest = best[0].tokens_per_s if best else 1.0
    yield f"{'':2}{'tokens/s':>10} {'GiB':>7}  "
    shown = [*best, *(one for one in frontier if one not in best)]
    for one in sorted(shown, key=lambda one: (-one.tokens_per_s, one.needs)):
        bar = "#" * max(1, round(20 * one.tokens_per_s / fastest))
        mark = "* " if one in frontier else "  "
        yield f"{mark}{one.tokens_per_s:10,.0f} {gib(one.needs):>7}  {bar:20}  {way(one.setup)}"
    yield "* the frontier: nothing that needs as little memory is faster"


def data(plan: Plan) -> dict[str, Any]:
    """The plan for programs: bytes and seconds."""
    return {
        "chip": plan.chip.name,
        "npus": plan.npus,
        "nodes": plan.nodes,
        "parameters": plan.choice.setup.shape.params,
        "trained": plan.choice.setup.trained,
        "assumed": plan.assumed,
        "steps": plan.steps or None,
        "run_seconds": plan.steps * plan.choice.clock.step or None,
        "run_kwh": plan.around.kwh,
        "checkpoint_bytes": round(plan.around.checkpoint),
        "model_bytes": round(plan.around.model),
        "host_bytes": {name: round(size) for name, size in plan.around.host.items()},
        "disk_bytes": {name: round(size) for name, size in plan.around.disk.items()},
        **described(plan.choice, plan.chip),
        "others": [described(one, plan.chip) for one in plan.others],
        "frontier": [described(one, plan.chip) for one in fit.frontier(plan.fitting)],
    }


def described(one: Choice, chip: Chip) -> dict[str, Any]:
    """A choice for programs: bytes and seconds."""
    setup, clock = one.setup, one.clock
    return {
        "strategy": setup.strategy,
        "offload": setup.offload,
        "recompute": setup.recompute,
        "micro_batch_tokens": setup.micro_tokens,
        "micro_steps": setup.micro_steps,
        "fits": one.fits,
        "memory_bytes": round(one.memory.total),
        "needs_bytes": round(one.needs),
        "room_bytes": round(one.room),
        "buffer_bytes": round(one.buffers),
        "moment": one.memory.moment,
        "parts": {name: round(size) for name, size in one.memory.parts.items()},
        "activations": {name: round(size) for name, size in one.memory.kinds.items()},
        "step_seconds": clock.step,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu(chip),
        "binding": binding(one),
    }


def _seconds(number: float) -> str:
    return f"{number:.2f} s" if number >= 1 else f"{1000 * number:.1f} ms"
