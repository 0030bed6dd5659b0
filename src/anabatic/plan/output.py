"""Output of `anabatic plan`: text tables, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from anabatic.core.formatting import format_count, format_duration, format_size
from anabatic.device.table import Chip
from anabatic.plan import strategy_search, tower_cost
from anabatic.plan.host_resources import DISK_BYTES_PER_SECOND, HostResources, count_writing_machines
from anabatic.plan.strategy_search import FRAGMENTATION, StrategyEstimate, find_bottleneck
from anabatic.plan.training_setup import TrainingSetup

_BAR_WIDTH = 30


LISTED_LAYOUTS = 15
"""Layouts that a list shows."""


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job.

    Attributes:
        shape_source: source of the shape.
        choice: the job as configured; fitting: all strategies and micro-batches that fit.
        steps: steps of the run; 0: unknown without the data.
        assumptions: values that were assumed.
        host_resources: resources besides the devices.
        chip_source: how the chip was determined, if the user did not name it.
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
        """The fastest micro-batch of each strategy, the fastest first."""
        return strategy_search.pick_fastest(self.fitting)


def format_gib(num_bytes: float) -> str:
    """Return a size in GiB: `12.34`."""
    return f"{num_bytes / 2**30:.2f}"


def format_strategy(setup: TrainingSetup) -> str:
    """Return the settings of a choice as one line."""
    parts = [setup.strategy + (", offload" if setup.offload else "")]
    if setup.replicate > 1:
        parts.append(f"replicate {setup.replicate}")
    if setup.expert > 1:
        parts.append(f"expert {setup.expert}")
    if setup.context > 1:
        parts.append(f"context {setup.context} ({setup.context_method})")
    if setup.tensor > 1:
        parts.append(f"tensor {setup.tensor}")
    if setup.pipeline > 1:
        parts.append(f"pipeline {setup.pipeline}" + f" x {setup.pipeline_chunks} chunks" * (setup.pipeline_chunks > 1))
    parts.append(f"recompute {setup.recompute}")
    parts.append(f"micro-batch {setup.micro_tokens:,} x {setup.micro_steps}")
    return ", ".join(parts)


def format_options(setup: TrainingSetup, has_model_section: bool) -> str:
    """Return the settings as options of a command; `has_model_section`: the command builds its model (`pretrain`)."""
    recompute = "model.recompute" if has_model_section else "recompute"
    options = f"--parallel.strategy {setup.strategy} --{recompute} {setup.recompute}"
    for name in ("pipeline", "replicate", "context", "expert", "tensor"):
        if (size := getattr(setup, name)) > 1:
            options += f" --parallel.{name} {size}"
    if setup.pipeline_chunks > 1:
        options += f" --parallel.pipeline-chunks {setup.pipeline_chunks}"
    if setup.context > 1 and setup.context_method != "ulysses":
        options += f" --parallel.context-method {setup.context_method}"
    options += f" --batch.micro-batch-tokens {setup.micro_tokens}"
    return options + (" --parallel.offload cpu" if setup.offload else "")


def format_plan_lines(plan: JobPlan, has_model_section: bool) -> Iterator[str]:
    """Yield the lines of a plan.

    Args:
        has_model_section: the model of the job is a section (`pretrain`).
    """
    setup, shape, choice = plan.choice.setup, plan.choice.setup.shape, plan.choice
    trained = (
        f"LoRA r {setup.rank}, {format_count(setup.whole_experts.trained_params)} trained"
        if setup.tuner == "lora"
        else f"{setup.tuner}"
    )
    active = f", {format_count(shape.active_params)} for a token" if shape.active_params < shape.params else ""
    yield (
        f"{format_count(shape.params)} parameters{active}: {shape.layers} blocks of width {shape.hidden} "
        f"({plan.shape_source}); {trained}"
    )
    if kinds := shape.describe_kinds():
        yield f"  blocks: {kinds}"
    yield from (f"  model: {note}" for note in shape.notes)
    yield from (f"  {line}" for line in tower_cost.iter_notes(setup))
    machines = f"{plan.nodes} x {plan.npus}" if plan.nodes > 1 else f"{plan.npus}"
    source = f" ({plan.chip_source})" if plan.chip_source else ""
    capacity = f"{plan.chip.memory_gib:.4g} GiB, {format_gib(choice.available_bytes)} for a job"
    yield f"{machines} x {plan.chip.name}{source}, {capacity}; {format_strategy(setup)}"
    yield from (f"  assumed: {line}" for line in plan.assumptions)
    yield ""
    yield from _memory_lines(choice)
    yield ""
    yield from _time_lines(plan)
    yield from _advice_lines(plan, has_model_section)


def _memory_lines(choice: StrategyEstimate) -> Iterator[str]:
    unit, factor = ("GiB", 1) if choice.needed_bytes >= 2**30 else ("MiB", 1024)
    yield f"Peak memory per device ({unit}), reached during {choice.memory.moment}"
    for name, size in choice.memory.parts.items():
        if size >= 0.005 * 2**30 / factor:
            bar = "#" * max(1, round(_BAR_WIDTH * size / max(choice.available_bytes, choice.needed_bytes)))
            yield f"  {name:24}{format_gib(factor * size):>8}  {bar}"
        if name == "activations":
            kinds = {
                kind: kind_size
                for kind, kind_size in choice.memory.kinds.items()
                if kind_size >= 0.005 * 2**30 / factor
            }
            yield from (
                f"    {kind:22}{format_gib(factor * kind_size):>8}"
                for kind, kind_size in kinds.items()
                if len(kinds) > 1
            )
    yield f"  {'fragments, assumed':24}{format_gib(factor * FRAGMENTATION * choice.memory.total):>8}"
    if choice.buffer_bytes:
        yield f"  {'communication buffers':24}{format_gib(factor * choice.buffer_bytes):>8}"
    excess_bytes = choice.needed_bytes - choice.available_bytes
    margin = (
        f"{format_gib(-factor * excess_bytes)} left"
        if choice.can_fit
        else f"{format_gib(factor * excess_bytes)} TOO MUCH"
    )
    yield f"  {'all':24}{format_gib(factor * choice.needed_bytes):>8}  {margin}"


def _time_lines(plan: JobPlan) -> Iterator[str]:
    choice, step_time = plan.choice, plan.choice.step_time
    yield (
        f"A step of {step_time.tokens:,} tokens: {_format_seconds(step_time.total_seconds)}, "
        f"{choice.tokens_per_s:,.0f} tokens/s,"
    )
    yield f"  {choice.compute_mfu(plan.chip):.0%} of the chips' peak; what decides: {find_bottleneck(choice)}"
    yield (
        f"  device {_format_seconds(step_time.compute)} (update {_format_seconds(step_time.update)}), launches "
        f"{_format_seconds(step_time.launches)},"
    )
    yield (
        f"  collectives {_format_seconds(step_time.collectives)}, of which "
        f"{_format_seconds(step_time.exposed_collectives)} are waited for"
    )
    if step_time.waiting:
        yield f"  stages wait {_format_seconds(step_time.waiting)} for each other"
    if plan.steps:
        tokens, seconds = (
            format_count(plan.steps * step_time.tokens),
            format_duration(plan.steps * step_time.total_seconds),
        )
        yield f"The run: {plan.steps:,} steps, {tokens} tokens, {seconds}{_format_energy(plan)}"
    yield from _resource_lines(plan)
    if plan.choice.setup.has_lm_head:
        yield from _generation_lines(plan)


def _format_energy(plan: JobPlan) -> str:
    if plan.host_resources.kwh is None:
        return "" if plan.chip.watts else "; energy: no power of this chip is published"
    return f"; at most {plan.host_resources.kwh:,.4g} kWh, the devices' {plan.chip.watts} W all the time"


def _resource_lines(plan: JobPlan) -> Iterator[str]:
    resources = plan.host_resources
    model_kind = "adapter" if plan.choice.setup.tuner == "lora" else "model"
    writers = count_writing_machines(plan.choice.setup, plan.nodes)
    seconds = _format_seconds(resources.checkpoint_bytes / writers / DISK_BYTES_PER_SECOND)
    rate = f"{DISK_BYTES_PER_SECOND / 1e9:g} GB/s" + f" on each of {writers} machines" * (writers > 1)
    yield (
        f"A checkpoint: {format_gib(resources.checkpoint_bytes)} GiB, {seconds} to write at an assumed {rate};"
        f" the saved {model_kind}: {format_gib(resources.model_bytes)} GiB"
    )
    for name, parts in (("Memory of each host", resources.host_bytes), ("Disk", resources.disk_bytes)):
        details = ", ".join(f"{part} {format_gib(size)}" for part, size in parts.items())
        yield f"{name}, GiB: {format_gib(sum(parts.values()))} ({details})"


def _advice_lines(plan: JobPlan, has_model_section: bool) -> Iterator[str]:
    if not plan.fitting:
        yield ""
        yield "Nothing that was tried fits: more devices, a chip with more memory, LoRA, or a shorter batch.seq_len."
        return
    best = plan.fastest_per_strategy[0]
    speed_up = best.tokens_per_s / plan.choice.tokens_per_s
    if plan.choice.can_fit and speed_up < 1.05:
        yield "No other strategy, recomputation or micro-batch that fits is more than 5 % faster."
        return
    yield ""
    gain = f"{speed_up:.2f}x as fast" if plan.choice.can_fit else "Fits"
    yield f"{gain}: {format_options(best.setup, has_model_section)}"
    yield f"  {format_gib(best.needed_bytes)} GiB, {best.tokens_per_s:,.0f} tokens/s"


def format_sweep_lines(plan: JobPlan) -> Iterator[str]:
    """Yield every strategy that fits with its fastest micro-batch, and the whole frontier, the fastest first."""
    best, frontier = plan.fastest_per_strategy, strategy_search.find_pareto_frontier(plan.fitting)
    fastest = best[0].tokens_per_s if best else 1.0
    yield f"{'':2}{'tokens/s':>10} {'GiB':>7}  "
    estimates = [*best, *(estimate for estimate in frontier if estimate not in best)]
    for estimate in sorted(estimates, key=lambda estimate: (-estimate.tokens_per_s, estimate.needed_bytes)):
        bar = "#" * max(1, round(20 * estimate.tokens_per_s / fastest))
        mark = "* " if estimate in frontier else "  "
        figures = f"{estimate.tokens_per_s:10,.0f} {format_gib(estimate.needed_bytes):>7}"
        yield f"{mark}{figures}  {bar:20}  {format_strategy(estimate.setup)}"
    yield "* the frontier: nothing that needs as little memory is faster"


def format_layout_lines(plan: JobPlan, has_model_section: bool) -> Iterator[str]:
    """Yield the layouts of the mesh that fit, each with its fastest settings, the fastest first."""
    fitting = sorted(plan.fitting, key=lambda estimate: -estimate.tokens_per_s)
    if not fitting:
        yield "No layout that was tried fits: more devices, a chip with more memory, LoRA, or a shorter batch.seq_len."
        return
    yield f"{'tokens/s':>10} {'GiB':>7}  "
    for estimate in fitting[:LISTED_LAYOUTS]:
        bar = "#" * max(1, round(20 * estimate.tokens_per_s / fitting[0].tokens_per_s))
        yield (
            f"{estimate.tokens_per_s:10,.0f} {format_gib(estimate.needed_bytes):>7}  {bar:20}  "
            f"{format_strategy(estimate.setup)}"
        )
    if len(fitting) > LISTED_LAYOUTS:
        yield f"and {len(fitting) - LISTED_LAYOUTS} slower layouts that fit"
    yield ""
    yield f"The fastest: {format_options(fitting[0].setup, has_model_section)}"


def _count_cache_bytes(setup: TrainingSetup) -> int:
    cache = setup.shape.measure_cache(setup.seq_len)
    return round(2 * cache.elements + 4 * cache.state_elements)


def _generation_lines(plan: JobPlan) -> Iterator[str]:
    """Yield what the trained model needs to generate: weights in 16 bits, and the cache of one sequence."""
    shape, tokens = plan.choice.setup.shape, plan.choice.setup.seq_len
    cache = shape.measure_cache(tokens)
    state = f", of which states {format_size(4 * cache.state_elements)}" if cache.state_elements else ""
    yield (
        f"To generate: weights {format_size(2 * shape.params)} in 16 bits; cache of a sequence of {tokens:,} tokens "
        f"{format_size(2 * cache.elements + 4 * cache.state_elements)}{state}"
    )


def plan_to_dict(plan: JobPlan) -> dict[str, Any]:
    """Return the plan as a dict: bytes and seconds."""
    return {
        "chip": plan.chip.name,
        "npus": plan.npus,
        "nodes": plan.nodes,
        "parameters": plan.choice.setup.shape.params,
        "active_parameters": plan.choice.setup.shape.active_params,
        "blocks": plan.choice.setup.shape.describe_kinds() or None,
        "pictures": None if plan.choice.setup.pictures is None else asdict(plan.choice.setup.pictures),
        "model_notes": list(plan.choice.setup.shape.notes),
        "cache_bytes": _count_cache_bytes(plan.choice.setup),
        "trained": plan.choice.setup.whole_experts.trained_params,
        "assumed": plan.assumptions,
        "steps": plan.steps or None,
        "run_seconds": plan.steps * plan.choice.step_time.total_seconds or None,
        "run_kwh": plan.host_resources.kwh,
        "checkpoint_bytes": round(plan.host_resources.checkpoint_bytes),
        "model_bytes": round(plan.host_resources.model_bytes),
        "host_bytes": {name: round(size) for name, size in plan.host_resources.host_bytes.items()},
        "disk_bytes": {name: round(size) for name, size in plan.host_resources.disk_bytes.items()},
        **estimate_to_dict(plan.choice, plan.chip),
        "others": [estimate_to_dict(estimate, plan.chip) for estimate in plan.fastest_per_strategy],
        "frontier": [
            estimate_to_dict(estimate, plan.chip) for estimate in strategy_search.find_pareto_frontier(plan.fitting)
        ],
    }


def estimate_to_dict(estimate: StrategyEstimate, chip: Chip) -> dict[str, Any]:
    """Return an estimate as a dict: bytes and seconds."""
    setup, step_time = estimate.setup, estimate.step_time
    return {
        "strategy": setup.strategy,
        "offload": setup.offload,
        "recompute": setup.recompute,
        "micro_batch_tokens": setup.micro_tokens,
        "micro_steps": setup.micro_steps,
        "layout": {
            name: getattr(setup, name)
            for name in ("pipeline", "pipeline_chunks", "replicate", "context", "expert", "tensor")
        },
        "fits": estimate.can_fit,
        "memory_bytes": round(estimate.memory.total),
        "needs_bytes": round(estimate.needed_bytes),
        "room_bytes": round(estimate.available_bytes),
        "buffer_bytes": round(estimate.buffer_bytes),
        "moment": estimate.memory.moment,
        "parts": {name: round(size) for name, size in estimate.memory.parts.items()},
        "activations": {name: round(size) for name, size in estimate.memory.kinds.items()},
        "step_seconds": step_time.total_seconds,
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.compute_mfu(chip),
        "binding": find_bottleneck(estimate),
    }


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
