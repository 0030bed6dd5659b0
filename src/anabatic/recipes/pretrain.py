"""`anabatic pretrain`: a base model from text, or mid-training of an existing one on a mixture."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from anabatic.config.pretrain import PretrainJob
from anabatic.core import log
from anabatic.data import sample
from anabatic.data import tokenizer as tokenizers
from anabatic.models import fuse, tensor
from anabatic.models.build import blank, count_parameters, initialise
from anabatic.models.hf import fill, load_config, recompute, require_fit, resolve, skeleton
from anabatic.models.place import format_of, place
from anabatic.parallel.shard import settle
from anabatic.plan.depth import Plan, shape
from anabatic.recipes.begin import begun, say_plan
from anabatic.recipes.training import Training, corpus
from anabatic.train import auto, paper
from anabatic.train import plan as planning


def run(job: PretrainJob) -> int:
    """Train as the job says; return the exit code."""
    with begun(job) as (job, folder, device, world, found):
        tokenizer_folder = Path(job.tokenizer) if job.tokenizer else resolve(str(job.model.path))
        tokenizer = tokenizers.load(tokenizer_folder)
        if job.model.path is not None:
            require_fit(load_config(job.model.path), tokenizer, tokenizer_folder, job.batch.length)
        # Before the text is read, which may take long: what is wrong with the settings is told here.
        plan, model = skeleton_of(job, len(tokenizer), format_of(job.optim, device))
        tensor.require_divisible(model, world.tensor.size)
        division = settle(job.parallel, world, device)
        data = corpus(job.data, tokenizer_folder, world, job.batch.length)
        if world.first:
            sample.say(data.tokenised, tokenizer, job.log.samples)

        root = place(model, division, device, world)
        if job.model.path is not None:
            fill(model, resolve(job.model.path))
        else:
            initialise(model, job.seed)
        log.info(fuse.settle(model, job.fused, device.type))
        epoch_tokens = sum(part.num_tokens for part, _ in data.train)
        tokens, why = planning.horizon_tokens(job.schedule, count_parameters(model)[1])
        if job.schedule.epochs is not None:
            tokens, why = job.schedule.epochs * epoch_tokens, f"{job.schedule.epochs:g} epochs"
        tuned_lr = None if job.model.path is None else 1e-4
        sizes = planning.settle(
            plan, job, model, epoch_tokens, tokens, why, paper.of_model(job, model, device, world.data), tuned_lr,
            device, world.data, settled=auto.batch_of(job, auto.state_of(job, world)),
        )  # fmt: skip
        say_plan(plan, model, world, division)

        code = Training(job, folder, device, world, root, division, tokenizer, data, plan, sizes, found).go()
    return code


def skeleton_of(job: PretrainJob, vocab_size: int, trained: torch.dtype) -> tuple[Plan, PreTrainedModel]:
    """Return the model without memory."""
    if job.model.path is not None:
        plan, model = Plan(), skeleton(resolve(job.model.path), trained)
    else:
        plan = shape(job.model, vocab_size)
        model = blank(plan, job.model, vocab_size, job.batch.length)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(trained)
    recompute(model, job.model.recompute)
    return plan, model
