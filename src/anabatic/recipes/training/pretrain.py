"""`anabatic pretrain`: a base model from text, or mid-training of an existing one on a mixture."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from anabatic.config.pretrain import PretrainJob
from anabatic.config.sections.common import DerivedSizes
from anabatic.core import log
from anabatic.data.chat import loss_preview
from anabatic.data.tokenizer.hf_folder import load_tokenizer
from anabatic.models import division, fused_ops
from anabatic.models.model_init import (
    build_meta_qwen3,
    count_parameters,
    init_weights,
    materialize_model,
    resolve_weight_dtype,
)
from anabatic.models.pretrained import (
    build_meta_causal_lm,
    enable_activation_checkpointing,
    load_folder_weights,
    require_tokenizer_fits,
    save_model,
)
from anabatic.parallel.collectives import barrier
from anabatic.parallel.sharding import divides_model, resolve_sharding
from anabatic.plan.depth_dial import derive_model_sizes
from anabatic.recipes.training.session import find_resolved_batch, log_plan, training_session
from anabatic.recipes.training.trained_model import TrainedModel, hold_all_stages
from anabatic.recipes.training.trainer import Trainer
from anabatic.recipes.training.training_data import DatasetBatches, build_training_data
from anabatic.train import sizing
from anabatic.train.objectives import make_next_token_objective
from anabatic.train.sizing import Horizon


def run(job: PretrainJob) -> int:
    """Train as the job says; return the exit code."""
    with training_session(job) as context:
        job, device, world = context.job, context.device, context.world
        base = context.model.base_folder  # None: a new model
        tokenizer_folder = Path(job.tokenizer) if job.tokenizer else context.model.folder
        assert tokenizer_folder is not None  # a new model needs a tokenizer
        tokenizer = load_tokenizer(tokenizer_folder)
        # Before the text is read, which may take long: what is wrong with the settings is reported here.
        plan, model = build_meta_model(job, base, len(tokenizer), resolve_weight_dtype(job.optim, device))
        require_tokenizer_fits(model.config, tokenizer, tokenizer_folder)
        if divides_model(world):
            division.require_divisible(model, world)
        sharding = resolve_sharding(job.parallel, world, device)
        data = build_training_data(job.data, tokenizer_folder, world, context.seq_len)
        if world.is_main_process:
            loss_preview.log_conversations(data.token_sets, tokenizer, job.log.samples)

        root = materialize_model(model, sharding, device, world)
        if base is not None:
            load_folder_weights(model, base)
        else:
            init_weights(model, job.seed)
        log.info(fused_ops.apply_fused_setting(model, job.fused, device.type))
        epoch_tokens = sum(part.num_tokens for part, _ in data.train)
        tokens, reason = sizing.compute_horizon_tokens(job.schedule, count_parameters(model)[1])
        if job.schedule.epochs is not None:
            tokens, reason = job.schedule.epochs * epoch_tokens, f"{job.schedule.epochs:g} epochs"
        tuned_lr = None if job.model.path is None else 1e-4
        sizes = sizing.resolve_sizes(
            job,
            device,
            world.data_group,
            plan,
            model,
            Horizon(epoch_tokens, tokens, reason),
            tuned_lr,
            settled=find_resolved_batch(context),
        )
        log_plan(plan, model, world, sharding, sizes.micro_steps)

        def save_folder(folder: Path) -> None:
            with hold_all_stages(model, world):
                save_model(model, folder, tokenizer, world.is_main_process)
            barrier(world)

        trained = TrainedModel(root, sharding, tokenizer, save_folder)
        objective = make_next_token_objective(root, device, world, context.seq_len)
        code = Trainer(context, trained, objective, DatasetBatches(context, data), plan, sizes).train_and_save()
    return code


def build_meta_model(
    job: PretrainJob, base: Path | None, vocab_size: int, trained: torch.dtype
) -> tuple[DerivedSizes, PreTrainedModel]:
    """Return the model without memory.

    Args:
        base: folder of the model that is continued; None: a new one.
    """
    if base is not None:
        plan, model = DerivedSizes(), build_meta_causal_lm(base, trained)
    else:
        plan = derive_model_sizes(job.model, vocab_size)
        model = build_meta_qwen3(plan, job.model, vocab_size, job.batch.resolved_seq_len)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(trained)
    enable_activation_checkpointing(model, job.model.recompute)
    return plan, model
