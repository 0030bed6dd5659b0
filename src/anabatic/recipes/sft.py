"""`anabatic sft`: fine-tune a causal language model on conversations; only what the assistant says is learned."""

from __future__ import annotations

from pathlib import Path

from anabatic.config.sft import SftJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.data import tokenizer as tokenizers
from anabatic.device.device import pick
from anabatic.models.build import Plan
from anabatic.models.hf import enable_recompute, load_model, resolve
from anabatic.parallel import world as parallel
from anabatic.recipes.training import Training, corpus, say_plan
from anabatic.train import plan as planning
from anabatic.train.run import find_checkpoint, open_folder


def run(job: SftJob) -> int:
    """Fine-tune as the job says; return the exit code."""
    device = pick(job.device)
    world = parallel.start(device)
    folder = open_folder(job, device, world)
    found = find_checkpoint(job, folder, world)
    base = resolve(job.model)
    tokenizer_folder = Path(job.tokenizer) if job.tokenizer else base
    tokenizer = tokenizers.load(tokenizer_folder)
    data = corpus(job.data, tokenizer_folder, world, job.batch.seq_len, job.train_on_inputs)

    model = load_model(base, device.torch)
    config = model.config
    if len(tokenizer) > config.vocab_size:
        raise DataError(
            f"the tokenizer has {len(tokenizer)} entries, the model {config.vocab_size}",
            "use the tokenizer of the model",
        )
    if job.recompute:
        enable_recompute(model)
    plan = Plan()
    epoch_tokens = sum(part.num_tokens for part, _ in data.train)
    tokens = (job.schedule.epochs or 1.0) * epoch_tokens
    half = device.dtype.itemsize == 2
    bytes_per_token = planning.activation_bytes(config.num_hidden_layers, config.hidden_size, job.recompute, half)
    micro, global_batch, micro_steps = planning.batch_sizes(plan, job.batch, tokens, bytes_per_token, device, world)
    lr, matrix_lr = planning.learning_rates(plan, job.optim, config.hidden_size, global_batch, 2e-5)
    steps = planning.total_steps(plan, job.schedule, epoch_tokens, tokens, "", global_batch)
    say_plan(plan, model, world)
    log.info(f"{steps} steps read {steps * global_batch / max(epoch_tokens, 1):.2f} times the conversations")

    code = Training(
        job, folder, device, world, model, tokenizer, data, plan, micro, micro_steps, steps, lr, matrix_lr, found
    ).go()
    parallel.stop(world)
    return code
