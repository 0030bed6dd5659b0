"""`--auto`: the layout that the plan proposes for the devices that are here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from typing import Any

from anabatic.core import json_reader, log, relaunch
from anabatic.core.errors import Failure
from anabatic.core.paths import RunFolder
from anabatic.data.vision.picture_load import find_picture_load
from anabatic.device.device import Device
from anabatic.device.table import Chip, DeviceRow
from anabatic.parallel.collectives import all_gather_text, barrier, broadcast_text
from anabatic.parallel.world import World, count_machine_ranks
from anabatic.plan import output, strategy_search
from anabatic.plan.model_facts import ModelFacts, with_model
from anabatic.plan.strategy_search import StrategyEstimate
from anabatic.plan.training_setup import DIVIDING_SETTINGS, Layout, TrainingSetup
from anabatic.train import sizing
from anabatic.train.auto.state import AUTO_FILE, AutoState, load_state, save_state

_DEFAULT_SEGMENTS_PER_RANK = 8
"""Of each rank in a step, where the global batch is left open, as `anabatic plan` takes it."""
_MIN_LAYOUT_GAIN = 1.2
"""The dimensions that a job has are left where its estimate with others is not so many times as fast: the estimates of
strategies on one mesh were compared with each other more closely than those of different meshes."""
SetupLister = Callable[[Any, ModelFacts, TrainingSetup, DeviceRow, int, int], Iterable[list[TrainingSetup]]]
"""`recipes.layout_search.iter_layout_setups`."""


def apply_auto_strategy(job: Any, model: ModelFacts, device: Device, world: World, list_setups: SetupLister) -> Any:
    """Return the job with the strategy, recomputation, offload and mesh that are proposed for these devices.

    Args:
        world: of the mesh that the job has.

    Raises:
        Failure: every way has been tried.
    """
    if job.save.resume == "never" and relaunch.RETRY_VARIABLE not in os.environ:
        (RunFolder(job.out).root / AUTO_FILE).unlink(missing_ok=True)
        barrier(world)
    state = load_state(job, world) or AutoState()
    given = [f"{name} {size}" for name in DIVIDING_SETTINGS if (size := getattr(job.parallel, name)) > 1]
    place = ", ".join([f"{world.size} x {device.name}", *given])
    if state.place != place:
        state = AutoState(lowered=state.lowered, place=place, batch=state.batch)
    if state.way is None:
        state = replace(state, way=_propose_layout(job, model, state, device, world, list_setups))
        if world.is_main_process:
            save_state(job, state)
        barrier(world)
    return _apply_layout(job, state.way)


def _propose_layout(
    job: Any, model: ModelFacts, state: AutoState, device: Device, world: World, list_setups: SetupLister
) -> Layout:
    """Return what rank 0 proposes: processors of several machines may differ, and so may their estimates."""
    here = job if model.folder is None else with_model(job, str(model.folder))  # of a run or on a hub
    shape, _ = model.require_shape()
    pictures = find_picture_load(here, shape.tower, model.base_folder or model.folder, model.config)
    setup = sizing.build_job_setup(here, shape, device, world.data_group, pictures)
    chip = sizing.get_local_chip(device, free=True)
    room = min(float(text) for text in all_gather_text(str(chip.memory_gib), world))  # the ranks' buffers are made now
    chip = replace(chip, memory_gib=room + strategy_search.estimate_buffer_bytes(setup, chip) / 2**30)
    answer: dict[str, Any] = {}
    if world.is_main_process:
        try:
            others = list_setups(here, model, setup, device.device_row, *count_machine_ranks(world))
            answer["way"] = astuple(choose_layout(job, state, device, chip, setup, others))
        except Failure as error:
            answer["failure"] = str(error), error.hint
    answer = json_reader.loads(broadcast_text(json.dumps(answer), world))
    if "failure" in answer:
        raise Failure(*answer["failure"])
    return Layout(*answer["way"])


def choose_layout(
    job: Any,
    state: AutoState,
    device: Device,
    chip: Chip,
    setup: TrainingSetup,
    layouts: Iterable[list[TrainingSetup]],
) -> Layout:
    """Return the fastest way by the estimate that fits; if none does, the one that needs least.

    Args:
        setup: the job as it is; layouts: the meshes of its devices, read where others than its own count.
    """
    micro = job.batch.micro_batch_tokens
    step = job.batch.global_batch_tokens or state.batch
    step = step or max(_DEFAULT_SEGMENTS_PER_RANK * setup.min_micro_batch, micro or 0) * setup.ranks

    def estimate_allowed(one: TrainingSetup) -> list[StrategyEstimate]:
        found = strategy_search.pick_micro_batches(one, step, chip, micro)
        return [way for way in found if _is_allowed(job, way.setup)]

    def can_share_batch(one: TrainingSetup) -> bool:
        return step % (one.ranks * (micro or one.min_micro_batch)) == 0

    tried = estimate_allowed(setup) if can_share_batch(setup) else []
    if setup.world_size > 1 and job.parallel.deepspeed is None and (device.type != "cpu" or not _find_fitting(tried)):
        others = [one for group in layouts for one in group if one.layout.divisions != setup.layout.divisions]
        tried += [way for one in others if can_share_batch(one) for way in estimate_allowed(one)]
    tried = tried or estimate_allowed(setup)
    left = [one for one in tried if one.setup.layout not in state.refused]
    failed = [one.needed_bytes for one in tried if one.setup.layout in state.refused]
    left = [one for one in left if not failed or one.needed_bytes < min(failed)]
    if not left:
        tried_out = "; ".join(layout.format() for layout in state.refused)
        raise Failure(
            f"no smaller setting is left to try in {output.format_gib(chip.memory_gib * 2**30)} GiB of {device.name}:"
            f" {tried_out} ran out of memory",
            "try adapters (--tuner lora), a shorter batch.seq_len or more devices; `anabatic plan` shows what is large",
        )
    choice = _pick_estimate(left, setup.layout)
    log.info(
        f"auto: {output.format_strategy(choice.setup)} is the fastest by the estimate that fits, "
        f"{output.format_gib(choice.needed_bytes)} GiB"
    )
    if not choice.can_fit:
        log.warn(f"auto: by the estimate {output.format_gib(choice.available_bytes)} GiB are there: it may not fit")
    return choice.setup.layout


def _pick_estimate(estimates: Sequence[StrategyEstimate], given: Layout) -> StrategyEstimate:
    """Return the fastest that fits, divided as the job is (`given`) unless another is clearly faster; if none fits, the
    smallest."""
    fitting = _find_fitting(estimates)
    if not fitting:
        return min(estimates, key=lambda one: one.needed_bytes)
    fastest = max(fitting, key=lambda one: one.tokens_per_s)
    kept = [one for one in fitting if one.setup.layout.divisions == given.divisions]
    as_it_is = max(kept, key=lambda one: one.tokens_per_s, default=fastest)
    return fastest if fastest.tokens_per_s > _MIN_LAYOUT_GAIN * as_it_is.tokens_per_s else as_it_is


def _find_fitting(estimates: Iterable[StrategyEstimate]) -> list[StrategyEstimate]:
    return [one for one in estimates if one.can_fit]


def _is_allowed(job: Any, setup: TrainingSetup) -> bool:
    """Return whether a layout agrees with the settings of the job."""
    wanted, recompute = job.parallel, getattr(job, "recompute", None) or job.model.recompute
    return (
        (wanted.strategy in ("auto", setup.strategy) or setup.strategy == "single")
        and (wanted.offload == "none" or setup.offload)
        and recompute in ("none", setup.recompute)
    )


def _apply_layout(job: Any, layout: Layout | None) -> Any:
    assert layout is not None
    offload = "cpu" if layout.offload else "none"
    parallel = replace(job.parallel, strategy=layout.strategy, offload=offload, deepspeed=None, **layout.divisions)
    if hasattr(job, "recompute"):
        return replace(job, parallel=parallel, recompute=layout.recompute)
    return replace(job, parallel=parallel, model=replace(job.model, recompute=layout.recompute))
