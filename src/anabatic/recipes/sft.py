"""`anabatic sft`: fine-tune a causal language model on conversations; only what the assistant says is learned."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from anabatic.config import deepspeed
from anabatic.config.sft import SftJob
from anabatic.config.tuner import Lora
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.data import padded, sample
from anabatic.data import tokenizer as tokenizers
from anabatic.data.learn import Learning, Turns
from anabatic.device.device import Device, pick
from anabatic.models import adapter, fuse
from anabatic.models.build import Plan
from anabatic.models.hf import base_of, fill, load_config, recompute, require_fit, resolve, skeleton
from anabatic.models.place import format_of, place
from anabatic.parallel import world as parallel
from anabatic.parallel.shard import settle
from anabatic.recipes.training import Training, corpus, say_plan
from anabatic.train import plan as planning
from anabatic.train.run import find_checkpoint, open_folder


def _learning(job: SftJob) -> Learning:
    turns: Turns = "all" if job.train_on_inputs else "last" if job.last_turn_only else "assistant"
    return Learning(turns, job.truncation_strategy)


def _skeleton(job: SftJob, named: Path, base: Path, device: Device) -> tuple[PreTrainedModel, Lora | None]:
    """Return the model without memory, what is trained requiring gradients, and the adapter's settings if it is one.

    What is frozen is kept in the format of the matrix products, what is trained as `optim.weights` says.
    """
    trained = format_of(job.optim, device)
    model = skeleton(base, trained if job.tuner == "full" else device.dtype)
    lora = None
    if named != base:
        if job.tuner != "lora":
            what = f"{named} is an adapter, and tuner is {job.tuner}"
            raise ConfigError(what, "go on with --tuner lora, or merge it first with `anabatic merge`")
        lora = adapter.prepare(model, named)
        log.info(f"going on with the adapter {named} of rank {lora.r}; the section lora is not used")
    elif job.tuner == "lora":
        lora = job.lora
        targets = adapter.insert(model, lora)
        log.info(f"LoRA of rank {lora.r} in {len(targets)} layers, scaled by {adapter.scale_of(lora):g}")
    elif job.tuner == "freeze":
        adapter.freeze(model, job.freeze)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    recompute(model, job.recompute)
    return model, lora


def run(job: SftJob) -> int:
    """Fine-tune as the job says; return the exit code."""
    job, told = deepspeed.apply(job, parallel.size())
    device = pick(job.device)
    world = parallel.start(device)
    planning.require_divisible(job.batch, world)
    with open_folder(job, device, world) as folder:
        for line in told:
            log.info(line)
        found = find_checkpoint(job, folder, world)
        named = resolve(job.model, job.hub, world)
        base = base_of(named, job.hub, world)
        tokenizer_folder = Path(job.tokenizer) if job.tokenizer else named
        tokenizer = tokenizers.load(tokenizer_folder)
        require_fit(load_config(base), tokenizer, tokenizer_folder, job.batch.seq_len)
        data = corpus(job.data, tokenizer_folder, world, job.batch.seq_len, _learning(job), job.curriculum)
        parts = [part for part, _ in data.train]
        if world.first:
            sample.say(parts, tokenizer, job.log.samples)
        if not job.batch.packing:
            padded.require_rows(parts)
        for part in parts:
            if not part.is_chat:
                log.warn(f"{part.name} is plain text without turns: all of it is learned")

        model, lora = _skeleton(job, named, base, device)
        division = settle(job.parallel, world, device)
        root = place(model, division, device, world)
        fill(model, base)
        if named != base:
            adapter.load(model, named)
        elif lora is not None:
            adapter.begin(model, lora, job.seed)
        log.info(fuse.settle(model, job.fused, device.type))
        plan = Plan()
        epoch_tokens = sum(part.num_tokens for part in parts)
        tokens = (job.schedule.epochs or 1.0) * epoch_tokens
        lr = 2e-5 if lora is None else 1e-4
        sizes = planning.settle(plan, job, model, epoch_tokens, tokens, "one epoch", job.recompute, lr, device, world)
        if not job.batch.packing:
            passing = padded.one_pass(parts, job.batch.seq_len, sizes.micro_batch_tokens, job.seed)
            sizes = planning.padded(plan, job.schedule, sizes, *passing, world)
        say_plan(plan, model, world, division)

        training = Training(job, folder, device, world, root, division, tokenizer, data, plan, sizes, found)
        training.lora, training.base, training.lessons = lora, base, job.curriculum
        code = training.go()
    parallel.stop(world)
    return code
