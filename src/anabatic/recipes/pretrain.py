"""`anabatic pretrain`: a base model from text, or mid-training of an existing one on a mixture."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from anabatic.config.pretrain import PretrainJob
from anabatic.data import sample
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import Device, pick
from anabatic.models.build import Plan, build, count_parameters, shape
from anabatic.models.hf import enable_recompute, load_config, load_model, require_fit, resolve
from anabatic.parallel import world as parallel
from anabatic.recipes.training import Training, corpus, say_plan
from anabatic.train import plan as planning
from anabatic.train.run import find_checkpoint, open_folder


def run(job: PretrainJob) -> int:
    """Train as the job says; return the exit code."""
    device = pick(job.device)
    world = parallel.start(device)
    planning.require_divisible(job.batch, world)
    with open_folder(job, device, world) as folder:
        found = find_checkpoint(job, folder, world)
        tokenizer_folder = Path(job.tokenizer) if job.tokenizer else resolve(str(job.model.path))
        tokenizer = tokenizers.load(tokenizer_folder)
        if job.model.path is not None:
            require_fit(load_config(job.model.path), tokenizer, tokenizer_folder, job.batch.seq_len)
        data = corpus(job.data, tokenizer_folder, world, job.batch.seq_len)
        if world.first:
            sample.say([part for part, _ in data.train], tokenizer, job.log.samples)

        plan, model = _model(job, device, len(tokenizer))
        epoch_tokens = sum(part.num_tokens for part, _ in data.train)
        tokens, why = planning.horizon_tokens(job.schedule, count_parameters(model)[1])
        if job.schedule.epochs is not None:
            tokens, why = job.schedule.epochs * epoch_tokens, f"{job.schedule.epochs:g} epochs"
        tuned_lr = None if job.model.path is None else 1e-4
        sizes = planning.settle(
            plan, job, model, epoch_tokens, tokens, why, job.model.recompute, tuned_lr, device, world
        )
        say_plan(plan, model, world)

        code = Training(job, folder, device, world, model, tokenizer, data, plan, sizes, found).go()
    parallel.stop(world)
    return code


def _model(job: PretrainJob, device: Device, vocab_size: int) -> tuple[Plan, PreTrainedModel]:
    if job.model.path is not None:
        plan, model = Plan(), load_model(job.model.path, device.torch)
    else:
        plan = shape(job.model, vocab_size)
        model = build(plan, job.model, vocab_size, job.batch.seq_len, device.torch, job.seed)
    if job.model.recompute:
        enable_recompute(model)
    return plan, model
