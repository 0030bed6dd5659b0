"""The model behind a training on words: new or from a folder, with room for the words, and the sizes of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from anabatic.config.classify_train import WordsJob
from anabatic.core import log
from anabatic.data.sequences import Sequences
from anabatic.device.device import Device
from anabatic.models import hf
from anabatic.models.build import blank, initialise
from anabatic.parallel.world import World
from anabatic.plan.depth import Plan, shape
from anabatic.recipes.classify_data import Base
from anabatic.train import paper
from anabatic.train import plan as planning
from anabatic.train.plan import Sizes


def skeleton(job: WordsJob, base: Base, entries: int, trained: torch.dtype) -> tuple[Plan, PreTrainedModel]:
    """Return the model without memory, with room for `entries` words."""
    if base.folder is not None:
        plan, model = Plan(), hf.skeleton(base.folder, trained, entries)
        hf.require_positions(model.config, job.batch.length)
    else:
        plan = shape(job.model, entries)
        model = blank(plan, job.model, entries, job.batch.length)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(trained)
    hf.recompute(model, job.model.recompute)
    return plan, model


def fill(model: PreTrainedModel, job: WordsJob, base: Base, known: int, entries: int) -> None:
    """Give a placed model its weights.

    Args:
        known: entries of the base's own tokenizer; those behind them, up to `entries`, are drawn anew.
    """
    if base.folder is None:
        initialise(model, job.seed)
    else:
        hf.fill(model, base.folder, range(known, entries), job.seed)


def sizes(
    plan: Plan, job: WordsJob, model: PreTrainedModel, train: Sequences, base: Base, device: Device, world: World
) -> tuple[Sizes, int]:
    """Settle the sizes of a step, and return how many steps one pass over the training data takes."""
    batch = job.batch
    if batch.global_batch_tokens is None:
        wanted = batch.rows * train.num_tokens / train.num_docs
        most = 4096 if device.type == "cpu" else 2**16
        micro = batch.micro_batch_tokens or max(batch.length, min(most, math.ceil(wanted / world.size)))
        steps = max(1, round(wanted / (micro * world.size)))
        batch = replace(batch, micro_batch_tokens=micro, global_batch_tokens=steps * micro * world.size)
        log.info(f"{batch.rows} segments a step are {batch.global_batch_tokens:,} words")
    sized = replace(job, batch=batch)
    tokens = (job.schedule.epochs or 1.0) * train.num_tokens
    tuned = 2e-5 if base.words is None else 2e-3 * (128 / model.config.hidden_size) ** 0.5  # of text, of words
    tuned = None if base.folder is None else tuned
    setup = paper.of_model(job, model, device, world)
    found = planning.settle(plan, sized, model, train.num_tokens, tokens, "given", setup, tuned, device, world)
    per_step = found.micro_batch_tokens * found.micro_steps * world.size
    return found, max(1, math.ceil(train.num_tokens / per_step))
