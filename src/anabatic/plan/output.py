"""What `anabatic plan` prints: tables for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anabatic.core.formatting import format_count, format_duration
from anabatic.device.table import Chip
from anabatic.plan import strategy_search
from anabatic.plan.host_resources import DISK_BYTES_PER_SECOND, HostResources
from anabatic.plan.strategy_search import FRAGMENTATION, StrategyEstimate, find_bottleneck
from anabatic.plan.training_setup import TrainingSetup

_BAR_WIDTH = 30


@dataclass(frozen=True)
class JobPlan:
    """A plan as text.

    Attributes:
        shape_source: where the shape is from.
        choice: the job as it stands; fitting: all ways and micro-batches that fit.
        steps: of the run; 0: not known without the data.
        assumptions: what was not given.
        host_resources: what the run needs beside its devices.
        chip_source: what says which devices these are, where the user has not.
    """

    shape_source: str
    chip: Chip
    npus: int
    nodes: int
    choice: StrategyEstimate
    fitting: list[StrategyEstimate]
    steps: int
    assumptions: list[str]
    host_resources: HostResources
    chip_source: str = ""

    @property
    def fastest_per_strategy(self) -> list[StrategyEstimate]:
        """The fastest micro-batch of each way, the fastest first."""
        return strategy_search.pick_fastest(self.fitting)


def format_gib(number: float) -> str:
    """`12.34`, in GiB."""
    return f"{number / 2**30:.2f}"


def format_strategy(setup: TrainingSetup) -> str:
    """The settings of a choice, in a line."""
    words = [setup.strategy + (", offload" if setup.offload else "")]
    if setup.tensor > 1:
        words.append(f"tensor {setup.tensor}")
    words.append(f"recompute {setup.recompute}")
    words.append(f"micro-batch {setup.micro_tokens:,} x {setup.micro_steps}")
    return ", ".join(words)


def format_options(setup: TrainingSetup, model: bool) -> str:
    """The same as options of a command; `model`: of one that builds its model."""
    recompute = "model.recompute" if model else "recompute"
    words = f"--parallel.strategy {setup.strategy} --{recompute} {setup.recompute}"
    words += f" --batch.micro-batch-tokens {setup.micro_tokens}"
    return words + (" --parallel.offload cpu" if setup.offload else "")


def format_plan_lines(plan: JobPlan, model: bool) -> Iterator[str]:
    """The plan for people.

    Args:
        model: the job's model is a section of its own (`pretrain`).
    """
    setup, shape, choice = plan.choice.setup, plan.choice.setup.shape, plan.choice
    trained = (
        f"LoRA r {setup.rank}, {format_count(setup.trained_params)} trained"
        if setup.tuner == "lora"
        else f"{setup.tuner}"
    )
    yield (
        f"{format_count(shape.params)} parameters: {shape.layers} blocks of width {shape.hidden} "
        f"({plan.shape_source}); {trained}"
    )
    machines = f"{plan.nodes} x {plan.npus}" if plan.nodes > 1 else f"{plan.npus}"
    said = f" ({plan.chip_source})" if plan.chip_source else ""
    room = f"{plan.chip.memory_gib:.4g} GiB, {format_gib(choice.available_bytes)} for a job"
    yield f"{machines} x {plan.chip.name}{said}, {room}; {format_strategy(setup)}"
    yield from (f"  assumed: {line}" for line in plan.assumptions)
    yield ""
    yield from _memory_lines(choice)
    yield ""
    yield from _time_lines(plan)
    yield from _advice_lines(plan, model)


def _memory_lines(choice: StrategyEstimate) -> Iterator[str]:
    unit, factor = ("GiB", 1) if choice.needed_bytes >= 2**30 else ("MiB", 1024)
    yield f"Memory of a device, {unit}, when it is highest: {choice.memory.moment}"
    for name, size in choice.memory.parts.items():
        if size >= 0.005 * 2**30 / factor:
            bar = "#" * max(1, round(_BAR_WIDTH * size / max(choice.available_bytes, choice.needed_bytes)))
            yield f"  {name:24}{format_gib(factor * size):>8}  {bar}"
        if name == "activations":
            shown = {kind: of for kind, of in choice.memory.kinds.items() if of >= 0.005 * 2**30 / factor}
            yield from (f"    {kind:22}{format_gib(factor * of):>8}" for kind, of in shown.items() if len(shown) > 1)
    yield f"  {'fragments, assumed':24}{format_gib(factor * FRAGMENTATION * choice.memory.total):>8}"
    if choice.buffer_bytes:
        yield f"  {'communication buffers':24}{format_gib(factor * choice.buffer_bytes):>8}"
    over = choice.needed_bytes - choice.available_bytes
    verdict = f"{format_gib(-factor * over)} left" if choice.can_fit else f"{format_gib(factor * over)} TOO MUCH"
    yield f"  {'all':24}{format_gib(factor * choice.needed_bytes):>8}  {verdict}"


def _time_lines(plan: JobPlan) -> Iterator[str]:
    choice, clock = plan.choice, plan.choice.step_time
    yield (
        f"A step of {clock.tokens:,} tokens: {_format_seconds(clock.total_seconds)}, "
        f"{choice.tokens_per_s:,.0f} tokens/s,"
    )
    yield f"  {choice.compute_mfu(plan.chip):.0%} of the chips' peak; what decides: {find_bottleneck(choice)}"
    yield (
        f"  device {_format_seconds(clock.compute)} (update {_format_seconds(clock.update)}), launches "
        f"{_format_seconds(clock.launches)},"
    )
    yield (
        f"  collectives {_format_seconds(clock.collectives)}, of which "
        f"{_format_seconds(clock.exposed_collectives)} are waited for"
    )
    if plan.steps:
        tokens, seconds = format_count(plan.steps * clock.tokens), format_duration(plan.steps * clock.total_seconds)
        yield f"The run: {plan.steps:,} steps, {tokens} tokens, {seconds}{_format_energy(plan)}"
    yield from _resource_lines(plan)


def _format_energy(plan: JobPlan) -> str:
    if plan.host_resources.kwh is None:
        return "" if plan.chip.watts else "; energy: no power of this chip is published"
    return f"; at most {plan.host_resources.kwh:,.4g} kWh, the devices' {plan.chip.watts} W all the time"


def _resource_lines(plan: JobPlan) -> Iterator[str]:
    found = plan.host_resources
    word = "adapter" if plan.choice.setup.tuner == "lora" else "model"
    yield (
        f"A checkpoint: {format_gib(found.checkpoint_bytes)} GiB, "
        f"{_format_seconds(found.checkpoint_bytes / DISK_BYTES_PER_SECOND)} to write at an assumed"
        f" {DISK_BYTES_PER_SECOND / 1e9:g} GB/s; the saved {word}: {format_gib(found.model_bytes)} GiB"
    )
    for name, parts in (("Memory of each host", found.host_bytes), ("Disk", found.disk_bytes)):
        told = ", ".join(f"{part} {format_gib(size)}" for part, size in parts.items())
        yield f"{name}, GiB: {format_gib(sum(parts.values()))} ({told})"


def _advice_lines(plan: JobPlan, model: bool) -> Iterator[str]:
    if not plan.fitting:
        yield ""
        yield "Nothing that was tried fits: more devices, a chip with more memory, LoRA, or a shorter batch.seq_len."
        return
    best = plan.fastest_per_strategy[0]
    gain = best.tokens_per_s / plan.choice.tokens_per_s
    if plan.choice.can_fit and gain < 1.05:
        yield "No other strategy, recomputation or micro-batch that fits is more than 5 % faster."
        return
    yield ""
    yield f"{'Fits' if not plan.choice.can_fit else f'{gain:.2f}x as fast'}: {format_options(best.setup, model)}"
    yield f"  {format_gib(best.needed_bytes)} GiB, {best.tokens_per_s:,.0f} tokens/s"


def format_sweep_lines(plan: JobPlan) -> Iterator[str]:
    """Every way that fits with its fastest micro-batch, and the whole frontier, the fastest first."""
    best, frontier = plan.fastest_per_strategy, strategy_search.find_pareto_frontier(plan.fitting)
    fastest = best[0].tokens_per_s if best else 1.0
    yield f"{'':2}{'tokens/s':>10} {'GiB':>7}  "
    shown = [*best, *(one for one in frontier if one not in best)]
    for one in sorted(shown, key=lambda one: (-one.tokens_per_s, one.needed_bytes)):
        bar = "#" * max(1, round(20 * one.tokens_per_s / fastest))
        mark = "* " if one in frontier else "  "
        yield (
            f"{mark}{one.tokens_per_s:10,.0f} {format_gib(one.needed_bytes):>7}  {bar:20}  {format_strategy(one.setup)}"
        )
    yield "* the frontier: nothing that needs as little memory is faster"


def plan_to_dict(plan: JobPlan) -> dict[str, Any]:
    """The plan for programs: bytes and seconds."""
    return {
        "chip": plan.chip.name,
        "npus": plan.npus,
        "nodes": plan.nodes,
        "parameters": plan.choice.setup.shape.params,
        "trained": plan.choice.setup.trained_params,
        "assumed": plan.assumptions,
        "steps": plan.steps or None,
        "run_seconds": plan.steps * plan.choice.step_time.total_seconds or None,
        "run_kwh": plan.host_resources.kwh,
        "checkpoint_bytes": round(plan.host_resources.checkpoint_bytes),
        "model_bytes": round(plan.host_resources.model_bytes),
        "host_bytes": {name: round(size) for name, size in plan.host_resources.host_bytes.items()},
        "disk_bytes": {name: round(size) for name, size in plan.host_resources.disk_bytes.items()},
        **estimate_to_dict(plan.choice, plan.chip),
        "others": [estimate_to_dict(one, plan.chip) for one in plan.fastest_per_strategy],
        "frontier": [estimate_to_dict(one, plan.chip) for one in strategy_search.find_pareto_frontier(plan.fitting)],
    }


def estimate_to_dict(one: StrategyEstimate, chip: Chip) -> dict[str, Any]:
    """A choice for programs: bytes and seconds."""
    setup, clock = one.setup, one.step_time
    return {
        "strategy": setup.strategy,
        "offload": setup.offload,
        "recompute": setup.recompute,
        "micro_batch_tokens": setup.micro_tokens,
        "micro_steps": setup.micro_steps,
        "fits": one.can_fit,
        "memory_bytes": round(one.memory.total),
        "needs_bytes": round(one.needed_bytes),
        "room_bytes": round(one.available_bytes),
        "buffer_bytes": round(one.buffer_bytes),
        "moment": one.memory.moment,
        "parts": {name: round(size) for name, size in one.memory.parts.items()},
        "activations": {name: round(size) for name, size in one.memory.kinds.items()},
        "step_seconds": clock.total_seconds,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.compute_mfu(chip),
        "binding": find_bottleneck(one),
    }


def _format_seconds(number: float) -> str:
    return f"{number:.2f} s" if number >= 1 else f"{1000 * number:.1f} ms"
