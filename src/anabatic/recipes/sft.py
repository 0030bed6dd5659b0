"""`anabatic sft`: fine-tune a causal language model on conversations; only what the assistant says is learned."""

from __future__ import annotations

from pathlib import Path

from anabatic.config.sft import SftJob
from anabatic.core import log
from anabatic.data import tokenizer as tokenizers
from anabatic.data.learn import Learning, Turns
from anabatic.device.device import pick
from anabatic.models.build import Plan
from anabatic.models.hf import enable_recompute, load_config, load_model, require_fit, resolve
from anabatic.parallel import world as parallel
from anabatic.recipes.training import Training, corpus, say_plan
from anabatic.train import plan as planning
from anabatic.train.run import find_checkpoint, open_folder


def _learning(job: SftJob) -> Learning:
    turns: Turns = "all" if job.train_on_inputs else "last" if job.last_turn_only else "assistant"
    return Learning(turns, job.truncation_strategy)


def run(job: SftJob) -> int:
    """Fine-tune as the job says; return the exit code."""
    device = pick(job.device)
    world = parallel.start(device)
    planning.require_divisible(job.batch, world)
    with open_folder(job, device, world) as folder:
        found = find_checkpoint(job, folder, world)
        base = resolve(job.model)
        tokenizer_folder = Path(job.tokenizer) if job.tokenizer else base
        tokenizer = tokenizers.load(tokenizer_folder)
        require_fit(load_config(base), tokenizer, tokenizer_folder, job.batch.seq_len)
        data = corpus(job.data, tokenizer_folder, world, job.batch.seq_len, _learning(job))
        for part, _ in data.train:
            if not part.is_chat:
                log.warn(f"{part.name} is plain text without turns: all of it is learned")

        model = load_model(base, device.torch)
        if job.recompute:
            enable_recompute(model)
        plan = Plan()
        epoch_tokens = sum(part.num_tokens for part, _ in data.train)
        tokens = (job.schedule.epochs or 1.0) * epoch_tokens
        sizes = planning.settle(plan, job, model, epoch_tokens, tokens, "one epoch", job.recompute, 2e-5, device, world)
        say_plan(plan, model, world)

        code = Training(job, folder, device, world, model, tokenizer, data, plan, sizes, found).go()
    parallel.stop(world)
    return code
