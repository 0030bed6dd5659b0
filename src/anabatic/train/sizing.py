"""Batch, learning rates and horizon: what the user left open follows from the model's size, with the reason."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from anabatic.config.sections.common import BatchSettings, DerivedSizes, Optim, Schedule
from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_count
from anabatic.data.vision.picture_load import find_picture_load
from anabatic.device.device import Device
from anabatic.device.table import Chip
from anabatic.models.model_init import count_parameters
from anabatic.parallel.mesh import RankGroup
from anabatic.plan import detect_chip, job_rules, model_shape, strategy_search, training_setup
from anabatic.plan.model_facts import find_model_facts
from anabatic.plan.model_shape import ASSUMED_UTILIZATION, TOKENS_PER_PARAM
from anabatic.plan.shapes.decoder_shape import DecoderShape
from anabatic.plan.shapes.tower_sizes import PictureLoad
from anabatic.plan.training_setup import TrainingSetup

MAX_USEFUL_EPOCHS = 40
"""Over the data: repeated more often, they are worthless (arXiv 2305.16264, figure 1)."""
MIN_USEFUL_STEPS = 10
"""Fewer updates than this hardly move a model; said where the number follows from the data."""
MICRO_BATCHES_PER_STAGE = 4
"""The stages of a pipeline then wait for at most a fifth of a step, where segments are short enough."""
REFERENCE_BATCH = 2**19
REFERENCE_TOKENS = 1.3e9
"""The batch that suits a run of this many tokens (nanochat, depth 12)."""
MIN_TIMED_STEPS = 3
"""A run with `schedule.minutes` is expected to have: one step that allocates, one that is timed, one that ends it."""
MIN_STEPS_OF_NEW_MODEL = 512
"""A new model gets at least this many updates: in a short run the power law leaves too few (docs/dev)."""


@dataclass(frozen=True)
class Horizon:
    """How long a run is where neither steps nor minutes are given.

    Attributes:
        epoch_tokens: one pass over the training data.
        tokens: of the whole run, and `reason`.
    """

    epoch_tokens: int
    tokens: float
    reason: str


@dataclass(frozen=True)
class StepSizes:
    """What a run was settled on."""

    micro_batch_tokens: int
    micro_steps: int
    steps: int
    lr: float
    matrix_lr: float

    def format_sizes(self, world: RankGroup) -> str:
        """Return the sizes of a step, for messages."""
        batch = self.micro_batch_tokens * self.micro_steps * world.size
        return f"micro-batches of {self.micro_batch_tokens:,} tokens x {self.micro_steps}, {batch:,} a step"

    def resume_constraints(self, world: RankGroup) -> dict[str, float]:
        """Return the values that must agree for a resumed run to give the same numbers, whatever its world size."""
        return {
            "batch.micro_batch_tokens": self.micro_batch_tokens,
            "batch.global_batch_tokens": self.micro_batch_tokens * self.micro_steps * world.size,
            "schedule.max_steps": self.steps,
            "optim.lr": self.lr,
            "optim.matrix_lr": self.matrix_lr,
        }


def resolve_sizes(
    job: LoopJob,
    device: Device,
    world: RankGroup,
    plan: DerivedSizes,
    model: PreTrainedModel,
    horizon: Horizon,
    tuned_lr: float | None,
    segment_tokens: int | None = None,
    settled: BatchSettings | None = None,
) -> StepSizes:
    """Settle batch, learning rates and steps, each with its reason in `plan`.

    Args:
        world: the ranks that read different data.
        tuned_lr: AdamW's default when an existing model is trained further; None for a new model.
        segment_tokens: tokens that a micro-batch must hold together; default: a segment.
        settled: sizes that an earlier start has come to, in place of the job's.

    Raises:
        ConfigError: the sizes do not divide one another.
    """
    epoch_tokens, tokens, reason = horizon.epoch_tokens, horizon.tokens, horizon.reason
    batch = settled or job.batch
    batch = batch if segment_tokens is None else replace(batch, seq_len=segment_tokens)
    if job.schedule.minutes is not None:
        tokens, reason = estimate_budget_tokens(job.schedule.minutes, model, device, world)
    min_steps = MIN_STEPS_OF_NEW_MODEL if tuned_lr is None else 1
    # A micro-batch that is given need not be estimated.
    setup = build_model_setup(job, model, device, world) if batch.micro_batch_tokens is None else None
    micro, global_batch, micro_steps = resolve_batch_sizes(plan, batch, tokens, setup, device, world, min_steps)
    if settled is not None:
        plan.reasons["micro_batch_tokens"] = "settled by an earlier start"
    lr, matrix_lr = resolve_learning_rates(
        plan, job.optim, model.config.get_text_config().hidden_size, global_batch, tuned_lr
    )
    steps = resolve_total_steps(plan, job.schedule, epoch_tokens, tokens, reason, global_batch)
    plan.add_value(
        "epochs", None, steps * global_batch / max(epoch_tokens, 1), f"of {format_count(epoch_tokens)} tokens"
    )
    return StepSizes(micro, micro_steps, steps, lr, matrix_lr)


def recount_padded_steps(
    plan: DerivedSizes, schedule: Schedule, sizes: StepSizes, batches: int, padding: float, world: RankGroup
) -> StepSizes:
    """Return `sizes` with the steps that the epochs take when rows are padded: a micro-batch then holds fewer of them.

    Args:
        batches: micro-batches of one pass.
        padding: share of padding in them.
    """
    per_step = sizes.micro_steps * world.size
    if schedule.max_steps is None and schedule.minutes is None and schedule.epochs is not None:
        sizes = replace(sizes, steps=max(1, math.ceil(schedule.epochs * batches / per_step - 1e-6)))
        plan.values["steps"] = sizes.steps
        plan.reasons["steps"] = f"{schedule.epochs:g} epochs of {batches:,} padded micro-batches"
    plan.add_value(
        "epochs", None, sizes.steps * per_step / batches, f"of {batches:,} micro-batches, {padding:.1%} padding"
    )
    return sizes


def count_rounds(epochs: float, questions: int, each: int) -> int:
    """Return how often `each` questions are asked in so many passes."""
    return max(1, math.ceil(epochs * questions / each - 1e-6))


def compute_horizon_tokens(schedule: Schedule, multiplying_params: int) -> tuple[float, str]:
    """Return the training tokens when neither steps nor epochs are given, and why."""
    ratio = schedule.tokens_per_param or TOKENS_PER_PARAM
    return ratio * multiplying_params, f"{ratio:g} tokens for each of {format_count(multiplying_params)} parameters"


def estimate_budget_tokens(
    minutes: float, model: PreTrainedModel, device: Device, world: RankGroup
) -> tuple[float, str]:
    """Return the training tokens that some minutes are about enough for, and why; the loop counts them exactly."""
    rate = get_local_chip(device).half_tflops * 1e12 * ASSUMED_UTILIZATION * world.size
    tokens = 60.0 * minutes * rate / (6 * count_parameters(model)[1])
    return tokens, f"about, for {minutes:g} minutes; the first steps are timed, a busy machine makes fewer"


def resolve_batch_sizes(
    plan: DerivedSizes,
    batch: BatchSettings,
    tokens: float,
    setup: TrainingSetup | None,
    device: Device,
    world: RankGroup,
    min_steps: int = 1,
) -> tuple[int, int, int]:
    """Return (micro-batch tokens, global batch tokens, micro-steps).

    The global batch grows with the horizon to the power 0.383 (arXiv 2505.13738) and is a power of two.

    Args:
        min_steps: the batch is so small that the horizon is at least this many steps, where a segment a step allows it.

    Raises:
        ConfigError: the sizes do not divide one another.
    """
    ideal = REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** 0.383
    reason = f"{format_count(tokens)} tokens to the power 0.383"
    ideal = 2 ** round(math.log2(max(ideal, 1)))
    largest = 2 ** math.floor(math.log2(max(tokens / min_steps, 1)))
    if min_steps > 1 and largest < ideal:
        ideal, reason = largest, f"at least {min_steps} steps in {format_count(tokens)} tokens"
    ideal = max(ideal, batch.resolved_seq_len, batch.micro_batch_tokens or 0)
    target = batch.global_batch_tokens or ideal
    micro, why = batch.micro_batch_tokens or 0, "given"
    if not micro:
        micro, why = _choose_micro_batch(batch.resolved_seq_len, target // world.size, setup, device)
    if batch.global_batch_tokens is None:
        target = max(1, round(target / (micro * world.size))) * micro * world.size
    elif batch.micro_batch_tokens is None and target % (micro * world.size):
        micro = find_divisor(target, world.size, micro, batch.resolved_seq_len) or micro
    plan.add_value("global_batch_tokens", batch.global_batch_tokens, target, reason)
    plan.add_value("micro_batch_tokens", batch.micro_batch_tokens, micro, why)
    settled = BatchSettings(seq_len=batch.resolved_seq_len, micro_batch_tokens=micro, global_batch_tokens=target)
    job_rules.raise_problems(job_rules.find_batch_problems(settled, world.size))
    return micro, target, target // (micro * world.size)


def _choose_micro_batch(seq_len: int, rank_tokens: int, setup: TrainingSetup | None, device: Device) -> tuple[int, str]:
    """Return the tokens of a micro-batch that fits and fills a pipeline, and why.

    Args:
        rank_tokens: this rank's share of a step.
    """
    fits = _largest_fitting_tokens(seq_len, rank_tokens, setup, device)
    parts = 1
    if setup is not None and setup.pipeline > 1:
        parts = math.ceil(MICRO_BATCHES_PER_STAGE * (setup.pipeline - 1) / setup.pipeline_chunks)
    most = rank_tokens // parts
    if parts > 1:
        most = 2 ** math.floor(math.log2(max(most, 1)))
    limits_by_stages = most < fits and parts > 1
    why = f"at least {parts} micro-batches fill the pipeline" if limits_by_stages else f"what fits on {device.type}"
    return max(seq_len, min(fits, most)), why


def find_divisor(target: int, ranks: int, maximum: int, minimum: int) -> int | None:
    """Return the largest micro-batch of at most `maximum` and at least `minimum` tokens that divides the rank's share;
    None where there is none."""
    if target % ranks:
        return None
    per_rank = target // ranks
    for parts in range(1, per_rank + 1):
        if per_rank // parts < minimum:
            return None
        if per_rank % parts == 0 and per_rank // parts <= maximum:
            return per_rank // parts
    return None


def _largest_fitting_tokens(seq_len: int, rank_tokens: int, setup: TrainingSetup | None, device: Device) -> int:
    """The largest power of two of tokens that fits beside the model, by the plan's count of its memory; where the plan
    does not know the model, a segment on a device, and what stays near the caches on a CPU."""
    chip = get_local_chip(device)
    if setup is not None:
        return strategy_search.find_largest_power_of_two(setup, chip, rank_tokens)
    return max(seq_len, strategy_search.get_max_tokens(chip)) if device.type == "cpu" else seq_len


def resolve_learning_rates(
    plan: DerivedSizes, optim: Optim, width: int, global_batch: int, tuned: float | None
) -> tuple[float, float]:
    """Return the peak learning rates of (AdamW, Muon).

    Args:
        tuned: AdamW's default when an existing model is trained further; None for a new model.
    """
    ratio = (global_batch / REFERENCE_BATCH) ** 0.25
    reason = f"x (batch / {REFERENCE_BATCH})^0.25"
    if tuned is None:
        plan.add_value("lr", optim.lr, 0.02 * ratio * (768 / width) ** 0.5, f"0.02 {reason} x (768 / width)^0.5")
    else:
        plan.add_value("lr", optim.lr, tuned, "gentle, for a trained model")
    if optim.name != "muon" and (optim.matrix_lr is not None or optim.momentum != Optim().momentum):
        log.warn(f"optim.name is {optim.name}: matrix_lr and momentum are Muon's and not used")
    if optim.name == "muon":
        new = 0.03 if tuned is None else 0.003
        plan.add_value("matrix_lr", optim.matrix_lr, new * ratio, f"{new} {reason}")
    return float(plan.values["lr"]), float(plan.values.get("matrix_lr", 0.0))


def resolve_total_steps(
    plan: DerivedSizes, schedule: Schedule, epoch_tokens: int, tokens: float, reason: str, global_batch: int
) -> int:
    """Return the optimizer steps of the run."""
    if schedule.minutes is not None:
        steps = max(MIN_TIMED_STEPS, round(tokens / global_batch))
        if schedule.max_steps is not None and schedule.max_steps <= steps:
            steps, reason = schedule.max_steps, f"given; fewer if {schedule.minutes:g} minutes are over before"
        elif schedule.max_steps is not None:
            reason += f"; at most schedule.max_steps {schedule.max_steps:,}"
    elif schedule.max_steps is not None:
        steps, reason = schedule.max_steps, "given"
    elif schedule.epochs is not None:
        steps = max(1, math.ceil(schedule.epochs * epoch_tokens / global_batch - 1e-6))
        reason = f"{schedule.epochs:g} epochs of {format_count(epoch_tokens)} tokens"
        if steps < MIN_USEFUL_STEPS:
            reason += "; so few teach little: raise schedule.epochs, or lower batch.global_batch_tokens"
    else:
        steps = max(1, round(tokens / global_batch))
        if (passes := tokens / max(epoch_tokens, 1)) > MAX_USEFUL_EPOCHS:
            log.warn(
                f"{reason} are {passes:,.0f} passes over the data; after {MAX_USEFUL_EPOCHS} they teach next to"
                " nothing: give more text, a smaller model, or --schedule.epochs 4"
            )
    plan.values["steps"], plan.reasons["steps"] = steps, reason
    return steps


_UNKNOWN_CHIP = Chip("unknown", 100.0, 0, 1000)
"""Speeds that rank the ways of a job on a chip that is in no table; an order of magnitude, no more."""


def get_local_chip(device: Device, free: bool = False) -> Chip:
    """Return this process's device as a row of the chips, with the memory that it reports.

    Args:
        free: what is free now, not all: it changes from start to start.
    """
    if device.type == "cpu":
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        row = detect_chip.describe_processor(local)
        return row if free else replace(row, memory_gib=device.get_total_memory() / 2**30 / local)
    row = device.chip or replace(_UNKNOWN_CHIP, name=device.name)
    if free:
        return replace(row, memory_gib=device.get_free_memory() / 2**30, taken_gib=0.0)
    return replace(
        row, memory_gib=device.get_total_memory() / 2**30, taken_gib=strategy_search.get_unavailable_gib(row)
    )


def build_job_setup(
    job: Any, found: DecoderShape, device: Device, world: RankGroup, pictures: PictureLoad | None = None
) -> TrainingSetup:
    """Return what of a job decides its memory on this device.

    Args:
        world: ranks with different data.
        pictures: of its rows.
    """
    return training_setup.build_setup(
        job, found, world.size, device.device_row, device.dtype.itemsize == 2, job.batch.resolved_seq_len, 1, pictures
    )


def build_model_setup(job: Any, model: PreTrainedModel, device: Device, world: RankGroup) -> TrainingSetup | None:
    """Return the same for a model that is there; None, with a log line, where its blocks are of another kind."""
    try:
        config = model.config.to_dict()
        found, _ = model_shape.read_whole_shape(config, "the model's configuration")
    except DataError as error:
        log.info(f"what fits is not planned, batch.micro_batch_tokens can say it: {error}")
        return None
    pictures = find_picture_load(job, found.tower, find_model_facts(job).folder, config)
    return build_job_setup(job, found, device, world, pictures)
