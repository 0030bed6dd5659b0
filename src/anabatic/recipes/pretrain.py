"""`anabatic pretrain`: a base model from text, or mid-training of an existing one on a mixture."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from anabatic.config.pretrain import PretrainJob
from anabatic.core import log
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import Device, pick
from anabatic.models.build import Plan, build, count_parameters, shape
from anabatic.models.hf import enable_recompute, load_model, resolve
from anabatic.parallel import world as parallel
from anabatic.recipes.training import Training, corpus, say_plan
from anabatic.train import plan as planning
from anabatic.train.run import find_checkpoint, open_folder


def run(job: PretrainJob) -> int:
    """Train as the job says; return the exit code."""
    device = pick(job.device)
    world = parallel.start(device)
    folder = open_folder(job, device, world)
    found = find_checkpoint(job, folder, world)
    tokenizer_folder = Path(job.tokenizer) if job.tokenizer else resolve(str(job.model.path))
    tokenizer = tokenizers.load(tokenizer_folder)
    data = corpus(job.data, tokenizer_folder, world, job.batch.seq_len)

    plan, model = _model(job, device, len(tokenizer))
    epoch_tokens = sum(part.num_tokens for part, _ in data.train)
    tokens, why = planning.horizon_tokens(job.schedule, count_parameters(model)[1])
    if job.schedule.epochs is not None:
        tokens, why = job.schedule.epochs * epoch_tokens, f"{job.schedule.epochs:g} epochs"
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    bytes_per_token = planning.activation_bytes(layers, width, job.model.recompute, device.dtype.itemsize == 2)
    micro, global_batch, micro_steps = planning.batch_sizes(plan, job.batch, tokens, bytes_per_token, device, world)
    lr, matrix_lr = planning.learning_rates(plan, job.optim, width, global_batch, None)
    steps = planning.total_steps(plan, job.schedule, epoch_tokens, tokens, why, global_batch)
    say_plan(plan, model, world)
    log.info(f"{steps} steps read {steps * global_batch / max(epoch_tokens, 1):.2f} times the training data")

    code = Training(
        job, folder, device, world, model, tokenizer, data, plan, micro, micro_steps, steps, lr, matrix_lr, found
    ).go()
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
