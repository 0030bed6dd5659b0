"""The model behind a training on words: new or from a folder, with room for the words, and the sizes of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from anabatic.config.vessels.train import WordsJob
from anabatic.core import log
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.device.device import Device
from anabatic.models import pretrained
from anabatic.models.model_init import build_meta_qwen3, init_weights
from anabatic.parallel.process_groups import World
from anabatic.plan.depth_dial import DerivedSizes, derive_model_sizes
from anabatic.train import plan_inputs
from anabatic.train import sizing as planning
from anabatic.train.sizing import StepSizes
from anabatic.vessels.io.vessel_splits import BaseModelInfo


def build_meta_model(
    job: WordsJob, base: BaseModelInfo, entries: int, trained: torch.dtype
) -> tuple[DerivedSizes, PreTrainedModel]:
    """Return the model without memory, with room for `entries` words."""
    if base.folder is not None:
        plan, model = DerivedSizes(), pretrained.build_meta_causal_lm(base.folder, trained, entries)
        pretrained.require_positions(model.config, job.batch.resolved_seq_len)
    else:
        plan = derive_model_sizes(job.model, entries)
        model = build_meta_qwen3(plan, job.model, entries, job.batch.resolved_seq_len)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(trained)
    pretrained.enable_activation_checkpointing(model, job.model.recompute)
    return plan, model


def init_or_load_weights(model: PreTrainedModel, job: WordsJob, base: BaseModelInfo, known: int, entries: int) -> None:
    """Give a placed model its weights.

    Args:
        known: entries of the base's own tokenizer; those behind them, up to `entries`, are drawn again.
    """
    if base.folder is None:
        init_weights(model, job.seed)
    else:
        pretrained.load_folder_weights(model, base.folder, range(known, entries), job.seed)


def resolve_step_sizes(
    plan: DerivedSizes,
    job: WordsJob,
    model: PreTrainedModel,
    train: SequenceDataset,
    base: BaseModelInfo,
    device: Device,
    world: World,
) -> tuple[StepSizes, int]:
    """Settle the sizes of a step, and return how many steps one pass over the training data takes."""
    batch = job.batch
    if batch.global_batch_tokens is None:
        wanted = batch.rows * train.num_tokens / train.num_docs
        most = 4096 if device.type == "cpu" else 2**16
        micro = batch.micro_batch_tokens or max(batch.resolved_seq_len, min(most, math.ceil(wanted / world.size)))
        steps = max(1, round(wanted / (micro * world.size)))
        batch = replace(batch, micro_batch_tokens=micro, global_batch_tokens=steps * micro * world.size)
        log.info(f"{batch.rows} segments a step are {batch.global_batch_tokens:,} words")
    sized = replace(job, batch=batch)
    tokens = (job.schedule.epochs or 1.0) * train.num_tokens
    tuned = 2e-5 if base.words is None else 2e-3 * (128 / model.config.hidden_size) ** 0.5  # of text, of words
    tuned = None if base.folder is None else tuned
    setup = plan_inputs.build_model_setup(job, model, device, world)
    found = planning.resolve_sizes(plan, sized, model, train.num_tokens, tokens, "given", setup, tuned, device, world)
    per_step = found.micro_batch_tokens * found.micro_steps * world.size
    return found, max(1, math.ceil(train.num_tokens / per_step))
