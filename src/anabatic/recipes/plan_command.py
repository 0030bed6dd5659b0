"""`anabatic plan`: estimated memory and time of a training, before it is queued. No torch, no weights."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabatic.config.rl import RlJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import write_atomic
from anabatic.data.vision.picture_load import find_picture_load
from anabatic.device import table
from anabatic.device.table import Chip
from anabatic.plan import (
    cost_model,
    detect_chip,
    device_scaling,
    job_rules,
    model_shape,
    output,
    strategy_search,
    training_setup,
)
from anabatic.plan.host_resources import estimate_host_resources
from anabatic.plan.mesh_shape import get_mesh_multiple
from anabatic.plan.scale_losses import ScaleAssumptions
from anabatic.plan.shapes.decoder_shape import DecoderShape
from anabatic.plan.step_time import StepTime
from anabatic.plan.training_setup import TrainingSetup
from anabatic.recipes import layout_search
from anabatic.recipes.resolve import Machine, ResolvedJob, resolve

DEFAULT_SEGMENTS_PER_RANK = 8
"""Of each rank in a step, where the global batch is left open."""


MAX_DEVICES = 1_000_000
"""Devices; what is known of networks ends long before."""
LOCAL_CHIP = "here"
"""In place of a chip's name: this machine's."""

_PLOT_PATH_HINT = "name a file in a folder that is there and yours with --plot FILE.svg"


def run(
    job: Any,
    place: Machine,
    tokens: int | None = None,
    as_json: bool = False,
    sweep: bool = False,
    plot: str | None = None,
    layouts: bool = False,
) -> int:
    """Print the plan of a resolved job; return 0, or 1 when it does not fit.

    Args:
        layouts: of every mesh of the devices.
        tokens: of one pass over the data, where the recipe gives no steps.
        plot: SVG file for the picture of all that fits.

    Raises:
        ConfigError: the sizes cannot be planned.
        Failure: the picture cannot be written.
    """
    resolved = resolve(job, place)
    plan = _estimate_resolved(resolved, place, tokens, layouts)
    resolved.log_notes()
    has_model_section = not isinstance(job.model, str)
    if plot is not None:
        write_atomic(Path(plot), device_scaling.draw_frontier(plan), _PLOT_PATH_HINT)
    if as_json:
        sys.stdout.write(json.dumps(output.plan_to_dict(plan)) + "\n")
    else:
        found = (
            output.format_layout_lines(plan, has_model_section)
            if layouts
            else output.format_sweep_lines(plan)
            if sweep
            else output.format_plan_lines(plan, has_model_section)
        )
        sys.stdout.write("\n".join(found) + "\n")
    return 0 if plan.choice.can_fit or (layouts and plan.fitting) else 1


def print_scaling(
    job: Any,
    place: Machine,
    max_devices: int,
    tokens: int | None = None,
    as_json: bool = False,
    plot: str | None = None,
    assumed: ScaleAssumptions | None = None,
) -> int:
    """Print what a resolved job gains by more and more devices; return 0, or 1 when it fits on none.

    Where the recipe gives the tokens of a step they are divided (strong scaling), else each device has as many (weak).

    Args:
        max_devices: devices; place.npus_per_node: of a machine.
        assumed: of slow machines, links, checkpoints and failures.
        plot: SVG file for the picture.

    Raises:
        ConfigError: the sizes cannot be planned.
        Failure: the picture cannot be written.
    """
    given = getattr(job.batch, "global_batch_tokens", None)
    chip, plans = place.known_chip, []
    for count in device_scaling.list_device_counts(place.npus_per_node, max_devices, get_mesh_multiple(job.parallel)):
        there = replace(
            place, npus_per_node=min(count, place.npus_per_node), nodes=max(1, count // place.npus_per_node)
        )
        plan = estimate_job(job, there, tokens)
        if given is not None and plan.choice.step_time.tokens > given:
            break  # less than a row for each
        plans.append(plan)
    rows = device_scaling.build_scaling_rows(plans, assumed)
    if not rows:
        log.warn(f"the job fits on no number of {chip.name} up to {max_devices:,}, in whatever way it is divided")
        if as_json:
            sys.stdout.write(json.dumps({"chip": chip.name, "held": None, "rows": []}) + "\n")
        return 1
    if plot is not None:
        title = f"{chip.name}, estimated: {device_scaling.describe_scaling(rows)}"
        write_atomic(Path(plot), device_scaling.draw_scaling(rows, title), _PLOT_PATH_HINT)
    if as_json:
        sys.stdout.write(json.dumps(device_scaling.scaling_to_dict(rows, chip)) + "\n")
    else:
        sys.stdout.write("\n".join(device_scaling.format_scaling_lines(rows)) + "\n")
        if left_out := device_scaling.describe_left_out(plans, rows):
            sys.stdout.write(f"{left_out}\n")
    return 0


def print_local_plan(job: Any) -> int:
    """Print the plan of a job as it would run here; return 0, or 1 when it does not fit."""
    return run(job, find_machine(job, LOCAL_CHIP, job.device.nproc, 1))


def find_machine(job: Any, chip: str, npus: int, nodes: int) -> Machine:
    """Return where a job is planned for: devices of the chip with that name, or of this machine."""
    if npus * nodes > MAX_DEVICES:
        raise ConfigError(f"{npus:,} devices x {nodes:,} machines is more than {MAX_DEVICES:,}", "plan a smaller job")
    if chip == LOCAL_CHIP:
        found, explanation = detect_chip.detect_job_chip(job.device.type, npus)
        return Machine(found, npus, nodes, explanation)
    return Machine(find_chip(chip), npus, nodes)


def devices_per_server(chip: str) -> int:
    """Return how many devices a server of a chip has."""
    return cost_model.get_chip_rates(find_chip(chip)).server


def estimate_job(job: Any, place: Machine, tokens: int | None = None, layouts: bool = False) -> output.JobPlan:
    """Return the plan of a resolved job.

    Args:
        layouts: what fits is the fastest of every mesh of the devices, not every setting of the given mesh.

    Raises:
        ConfigError, DataError: the model is not known here, the chip trains nothing, or the sizes cannot be planned.
    """
    return _estimate_resolved(resolve(job, place), place, tokens, layouts)


def _estimate_resolved(resolved: ResolvedJob[Any], place: Machine, tokens: int | None, layouts: bool) -> output.JobPlan:
    job, ranks, (shape, source) = resolved.job, resolved.mesh.data_size, resolved.model.require_shape()
    chip = place.known_chip
    assumed: list[str] = []
    row = table.get_device_row(chip)
    half = (row.dtype if job.device.dtype == "auto" else job.device.dtype) != "fp32"
    model = resolved.model
    pictures = find_picture_load(job, shape.tower, model.base_folder or model.folder, model.config)
    base = training_setup.build_setup(job, shape, ranks, row, half, job.batch.resolved_seq_len, 1, pictures)
    micro, step = _resolve_batch_tokens(job, base, assumed)
    if micro is None:
        choice = strategy_search.choose_micro_batch(base, step, chip)
        best = "largest" if base.pipeline == 1 else "fastest"
        choice_text = f"the {best} that fits" if choice.can_fit else "the smallest"
        assumed.append(f"batch.micro_batch_tokens {choice.setup.micro_tokens}, {choice_text}")
    else:
        choice = strategy_search.estimate_strategy(
            replace(base, micro_tokens=micro, micro_steps=max(1, step // (micro * ranks))), chip
        )
    if job.batch.global_batch_tokens not in (None, choice.step_time.tokens) and not isinstance(job, RlJob):
        choice_text = (
            f"batch.global_batch_tokens {step} is no multiple of {ranks} ranks x {choice.setup.micro_tokens} tokens"
        )
        assumed.append(f"a step of {choice.step_time.tokens} tokens; {choice_text}, and a training refuses it")
    steps = _estimate_steps(job, shape, tokens, choice.step_time)
    fixed = micro if isinstance(job, RlJob) else None
    if layouts:
        fitting = _search_layouts(resolved, place, base, step)
    else:
        fitting = [one for one in strategy_search.list_fitting(base, step, chip, fixed) if _supports_sharding(job, one)]
    host_resources = estimate_host_resources(
        choice.setup, job, chip, place.npus_per_node, steps * choice.step_time.total_seconds, tokens
    )
    return output.JobPlan(
        source,
        chip,
        place.npus_per_node,
        place.nodes,
        choice,
        fitting,
        steps,
        assumed,
        host_resources,
        place.chip_source,
    )


def _search_layouts(
    resolved: ResolvedJob[Any], place: Machine, base: TrainingSetup, step: int
) -> list[strategy_search.StrategyEstimate]:
    """Return the fastest settings that fit of every mesh of the devices."""
    chip = place.known_chip
    found = []
    for setups in layout_search.iter_layout_setups(
        resolved.job, resolved.model, base, table.get_device_row(chip), place.npus_per_node, place.nodes
    ):
        choices = [strategy_search.find_fastest(setup, step, chip) for setup in setups]
        fitting = [choice for choice in choices if choice is not None]
        if fitting:
            found.append(max(fitting, key=lambda choice: choice.tokens_per_s))
    return found


def _resolve_batch_tokens(job: Any, base: TrainingSetup, assumed: list[str]) -> tuple[int | None, int]:
    """Tokens of a micro-batch, None where they are left open, and of a step."""
    if isinstance(job, RlJob):
        each = job.device_batch_size * job.batch.resolved_seq_len
        answers = job_rules.count_update_answers(job)
        assumed += [f"{error}, and a training refuses it" for error in job_rules.find_answer_problems(job, base.ranks)]
        assumed.append(
            f"{job.device_batch_size} answers of batch.seq_len {job.batch.resolved_seq_len} tokens, the longest"
        )
        assumed.append("the time to draw and judge answers is not counted; their cache is freed before the update")
        return each, answers * job.batch.resolved_seq_len
    micro, step = job.batch.micro_batch_tokens, job.batch.global_batch_tokens
    rows = job.get_plan_facts().step_rows
    if step is None and rows is not None:
        step = max(rows * job.batch.resolved_seq_len, base.ranks * base.min_micro_batch)
        assumed.append(f"batch.rows {rows} of batch.seq_len {job.batch.resolved_seq_len} words, the longest")
    elif step is None:
        step = max(DEFAULT_SEGMENTS_PER_RANK * base.min_micro_batch, micro or 0) * base.ranks
        assumed.append(f"batch.global_batch_tokens {step}")
    return micro, step


def _supports_sharding(job: Any, one: strategy_search.StrategyEstimate) -> bool:
    """Return whether the command supports a sharding strategy: rollouts need whole weights."""
    return not (isinstance(job, RlJob) and one.setup.is_sharded)


def _estimate_steps(job: Any, shape: DecoderShape, tokens: int | None, step_time: StepTime) -> int:
    """Return the steps of the run; 0 where they depend on the data."""
    step = step_time.tokens
    if job.schedule.minutes is not None:
        fitting = max(1, round(60 * job.schedule.minutes / step_time.total_seconds))
        return min(fitting, job.schedule.max_steps or fitting)
    if job.schedule.max_steps is not None:
        return int(job.schedule.max_steps)
    if tokens is not None:
        return max(1, round(tokens * (job.schedule.epochs or 1) / step))
    if job.schedule.epochs is None:
        ratio = job.schedule.tokens_per_param or model_shape.TOKENS_PER_PARAM
        return max(1, round(ratio * shape.multiplying_params / step))
    return 0


def find_chip(name: str) -> Chip:
    """Return the chip called `910B3`, `Ascend910B3`, `910C` or `H100`.

    Raises:
        ConfigError: there is none.
    """
    normalized = name.lower().replace(" ", "")
    rows = {chip.name: chip for chip in table.CHIPS}
    ends = [chip for title, chip in rows.items() if title.lower().replace(" ", "").endswith(normalized)]
    first = [chip for title, chip in rows.items() if normalized in title.lower().replace(" ", "")]
    if normalized == "910c":
        return rows["Ascend910_9391"]
    if not normalized or not (ends or first):
        raise ConfigError(f"no chip {name!r} is known.{did_you_mean(name, rows)}", f"these are: {', '.join(rows)}")
    return (ends or first)[0]
