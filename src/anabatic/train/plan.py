"""Batch, learning rates and horizon: what the user left open follows from the model's size, with the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from transformers import PreTrainedModel

from anabatic.config.shared import Batch, Optim, Schedule
from anabatic.core import log
from anabatic.core.text import count
from anabatic.device.device import Device
from anabatic.parallel.world import Group
from anabatic.plan import divide, fit
from anabatic.plan.depth import Plan
from anabatic.plan.setup import Setup
from anabatic.train import paper

TOKENS_PER_PARAM = 12.0
"""Training tokens per multiplying parameter (nanochat's compute-optimal ratio for this kind of model)."""
MOST_PASSES = 40
"""Over the data: repeated more often, they are worthless (arXiv 2305.16264, figure 1)."""
FEW_STEPS = 10
"""Fewer updates than this hardly move a model; said where the number follows from the data."""
REFERENCE_BATCH = 2**19
REFERENCE_TOKENS = 1.3e9
"""The batch that suits a run of this many tokens (nanochat, depth 12)."""


class Sizable(Protocol):
    """The sections that decide a run's sizes."""

    @property
    def batch(self) -> Batch:
        """How many tokens enter a step."""

    @property
    def optim(self) -> Optim:
        """The optimizer."""

    @property
    def schedule(self) -> Schedule:
        """How long to train."""


@dataclass(frozen=True)
class Sizes:
    """What a run was settled on."""

    micro_batch_tokens: int
    micro_steps: int
    steps: int
    lr: float
    matrix_lr: float

    def told(self, world: Group) -> str:
        """The sizes of a step, for messages."""
        batch = self.micro_batch_tokens * self.micro_steps * world.size
        return f"micro-batches of {self.micro_batch_tokens:,} tokens x {self.micro_steps}, {batch:,} a step"

    def decisive(self, world: Group) -> dict[str, float]:
        """What a run that continues must agree on, under any world size, to go on with the same numbers."""
        return {
            "batch.micro_batch_tokens": self.micro_batch_tokens,
            "batch.global_batch_tokens": self.micro_batch_tokens * self.micro_steps * world.size,
            "schedule.max_steps": self.steps,
            "optim.lr": self.lr,
            "optim.matrix_lr": self.matrix_lr,
        }


def settle(
    plan: Plan,
    job: Sizable,
    model: PreTrainedModel,
    epoch_tokens: int,
    tokens: float,
    why: str,
    setup: Setup | None,
    tuned_lr: float | None,
    device: Device,
    world: Group,
    whole: int | None = None,
    settled: Batch | None = None,
) -> Sizes:
    """Settle batch, learning rates and steps, each with its reason in `plan`.

    Args:
        epoch_tokens: one pass over the training data.
        tokens: horizon of the run where neither steps nor epochs are given, and `why`.
        setup: what of the job decides its memory; None: it is not known.
        tuned_lr: AdamW's default when an existing model is trained further; None for a new model.
        whole: tokens that a micro-batch must hold together; default: a segment.
        settled: sizes that an earlier start has come to, in place of the job's.

    Raises:
        ConfigError: the sizes do not divide one another.
    """
    batch = settled or job.batch
    batch = batch if whole is None else replace(batch, seq_len=whole)
    micro, global_batch, micro_steps = batch_sizes(plan, batch, tokens, setup, device, world)
    if settled is not None:
        plan.reasons["micro_batch_tokens"] = "settled by an earlier start"
    lr, matrix_lr = learning_rates(plan, job.optim, model.config.hidden_size, global_batch, tuned_lr)
    steps = total_steps(plan, job.schedule, epoch_tokens, tokens, why, global_batch)
    plan.add("epochs", None, steps * global_batch / max(epoch_tokens, 1), f"of {count(epoch_tokens)} tokens")
    return Sizes(micro, micro_steps, steps, lr, matrix_lr)


def padded(plan: Plan, schedule: Schedule, sizes: Sizes, batches: int, padding: float, world: Group) -> Sizes:
    """Return `sizes` with the steps that the epochs take when rows are padded: a micro-batch then holds fewer of them.

    Args:
        batches: micro-batches of one pass.
        padding: share of padding in them.
    """
    per_step = sizes.micro_steps * world.size
    if schedule.max_steps is None and schedule.epochs is not None:
        sizes = replace(sizes, steps=max(1, math.ceil(schedule.epochs * batches / per_step - 1e-6)))
        plan.values["steps"] = sizes.steps
        plan.reasons["steps"] = f"{schedule.epochs:g} epochs of {batches:,} padded micro-batches"
    plan.add("epochs", None, sizes.steps * per_step / batches, f"of {batches:,} micro-batches, {padding:.1%} padding")
    return sizes


def rounds(epochs: float, questions: int, each: int) -> int:
    """Return how often `each` questions are asked in so many passes."""
    return max(1, math.ceil(epochs * questions / each - 1e-6))


def horizon_tokens(schedule: Schedule, multiplying_params: int) -> tuple[float, str]:
    """Return the training tokens when neither steps nor epochs are given, and why."""
    ratio = schedule.tokens_per_param or TOKENS_PER_PARAM
    return ratio * multiplying_params, f"{ratio:g} tokens for each of {count(multiplying_params)} parameters"


def batch_sizes(
    plan: Plan, batch: Batch, tokens: float, setup: Setup | None, device: Device, world: Group
) -> tuple[int, int, int]:
    """Return (micro-batch tokens, global batch tokens, micro-steps).

    The global batch grows with the horizon to the power 0.383 (arXiv 2505.13738) and is a power of two.

    Raises:
        ConfigError: the sizes do not divide one another.
    """
    ideal = REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** 0.383
    ideal = max(2 ** round(math.log2(max(ideal, 1))), batch.length, batch.micro_batch_tokens or 0)
    target = batch.global_batch_tokens or ideal
    fits = _fitting(batch.length, target // world.size, setup, device)
    micro = batch.micro_batch_tokens or max(batch.length, min(fits, target // world.size))
    if batch.global_batch_tokens is None:
        target = max(1, round(target / (micro * world.size))) * micro * world.size
    elif batch.micro_batch_tokens is None and target % (micro * world.size):
        micro = divisor(target, world.size, micro, batch.length) or micro
    plan.add("global_batch_tokens", batch.global_batch_tokens, target, f"{count(tokens)} tokens to the power 0.383")
    plan.add("micro_batch_tokens", batch.micro_batch_tokens, micro, f"what fits on {device.type}")
    divide.require_batch(Batch(seq_len=batch.length, micro_batch_tokens=micro, global_batch_tokens=target), world.size)
    return micro, target, target // (micro * world.size)


def divisor(target: int, ranks: int, most: int, least: int) -> int | None:
    """Return the largest micro-batch of at most `most` and at least `least` tokens that divides the rank's share;
    None where there is none."""
    if target % ranks:
        return None
    share = target // ranks
    for parts in range(1, share + 1):
        if share // parts < least:
            return None
        if share % parts == 0 and share // parts <= most:
            return share // parts
    return None


def _fitting(seq_len: int, share: int, setup: Setup | None, device: Device) -> int:
    """The largest power of two of tokens that fits beside the model, by the plan's count of its memory; where the plan
    does not know the model, a segment on a device, and what stays near the caches on a CPU."""
    chip = paper.chip_of(device)
    if setup is not None:
        return fit.power_that_fits(setup, chip, share)
    return max(seq_len, fit.most_tokens(chip)) if device.type == "cpu" else seq_len


def learning_rates(plan: Plan, optim: Optim, width: int, global_batch: int, tuned: float | None) -> tuple[float, float]:
    """Return the peak learning rates of (AdamW, Muon).

    Args:
        tuned: AdamW's default when an existing model is trained further; None for a new model.
    """
    ratio = (global_batch / REFERENCE_BATCH) ** 0.25
    reason = f"x (batch / {REFERENCE_BATCH})^0.25"
    if tuned is None:
        plan.add("lr", optim.lr, 0.02 * ratio * (768 / width) ** 0.5, f"0.02 {reason} x (768 / width)^0.5")
    else:
        plan.add("lr", optim.lr, tuned, "gentle, for a trained model")
    if optim.name != "muon" and (optim.matrix_lr is not None or optim.momentum != Optim().momentum):
        log.warn(f"optim.name is {optim.name}: matrix_lr and momentum are Muon's and not used")
    if optim.name == "muon":
        new = 0.03 if tuned is None else 0.003
        plan.add("matrix_lr", optim.matrix_lr, new * ratio, f"{new} {reason}")
    return float(plan.values["lr"]), float(plan.values.get("matrix_lr", 0.0))


def total_steps(plan: Plan, schedule: Schedule, epoch_tokens: int, tokens: float, why: str, global_batch: int) -> int:
    """Return the optimizer steps of the run."""
    if schedule.max_steps is not None:
        steps, why = schedule.max_steps, "given"
    elif schedule.epochs is not None:
        steps = max(1, math.ceil(schedule.epochs * epoch_tokens / global_batch - 1e-6))
        why = f"{schedule.epochs:g} epochs of {count(epoch_tokens)} tokens"
        if steps < FEW_STEPS:
            why += "; so few teach little: raise schedule.epochs, or lower batch.global_batch_tokens"
    else:
        steps = max(1, round(tokens / global_batch))
        if (passes := tokens / max(epoch_tokens, 1)) > MOST_PASSES:
            log.warn(
                f"{why} are {passes:,.0f} passes over the data; after {MOST_PASSES} they teach next to nothing:"
                " give more text, a smaller model, or --schedule.epochs 4"
            )
    plan.values["steps"], plan.reasons["steps"] = steps, why
    return steps
