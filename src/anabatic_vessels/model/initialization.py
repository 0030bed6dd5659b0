"""The model of a training on vessel words, new or from a folder, with embeddings for the words; and step sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from anabatic.config.sections.common import DerivedSizes
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.models import pretrained
from anabatic.models.model_init import build_meta_qwen3, init_weights
from anabatic.plan.depth_dial import derive_model_sizes
from anabatic.train import sizing as planning
from anabatic.train.context import TrainContext
from anabatic.train.sizing import StepSizes
from anabatic_vessels.config.train import WordsJob
from anabatic_vessels.io.vessel_splits import BaseModelInfo


def build_meta_model(
    job: WordsJob, base: BaseModelInfo, vocab_size: int, dtype: torch.dtype
) -> tuple[DerivedSizes, PreTrainedModel]:
    """Return the model on the meta device, with `vocab_size` embeddings."""
    if base.folder is not None:
        sizes, model = DerivedSizes(), pretrained.build_meta_causal_lm(base.folder, dtype, vocab_size)
    else:
        sizes = derive_model_sizes(job.model, vocab_size)
        model = build_meta_qwen3(sizes, job.model, vocab_size, job.batch.resolved_seq_len)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    pretrained.enable_activation_checkpointing(model, job.model.recompute)
    return sizes, model


def init_or_load_weights(
    model: PreTrainedModel, job: WordsJob, base: BaseModelInfo, num_known: int, vocab_size: int
) -> None:
    """Initialize or load the weights of a materialized model.

    Args:
        num_known: entries of the base model's tokenizer; later ones, up to `vocab_size`, are initialized.
    """
    if base.folder is None:
        init_weights(model, job.seed)
    else:
        pretrained.load_folder_weights(model, base.folder, range(num_known, vocab_size), job.seed)


def resolve_step_sizes(
    context: TrainContext[WordsJob],
    derived: DerivedSizes,
    model: PreTrainedModel,
    train: SequenceDataset,
    base: BaseModelInfo,
) -> tuple[StepSizes, int]:
    """Return the sizes of a step, and the number of steps per epoch."""
    job, device, world = context.job, context.device, context.world
    batch = job.batch
    if batch.global_batch_tokens is None:
        target_tokens = batch.rows * train.num_tokens / train.num_docs
        max_tokens = 4096 if device.type == "cpu" else 2**16
        micro_tokens = batch.micro_batch_tokens or max(
            batch.resolved_seq_len, min(max_tokens, math.ceil(target_tokens / world.size))
        )
        steps = max(1, round(target_tokens / (micro_tokens * world.size)))
        batch = replace(batch, micro_batch_tokens=micro_tokens, global_batch_tokens=steps * micro_tokens * world.size)
        log.info(f"{batch.rows} segments a step are {batch.global_batch_tokens:,} words")
    tokens = (job.schedule.epochs or 1.0) * train.num_tokens
    default_lr = (
        2e-5 if base.words is None else 2e-3 * (128 / model.config.hidden_size) ** 0.5
    )  # from a text model, from a model of words
    default_lr = None if base.folder is None else default_lr
    horizon = planning.Horizon(train.num_tokens, tokens, "given")
    sized = replace(job, batch=batch)
    sizes = planning.resolve_sizes(sized, device, world.data_group, derived, model, horizon, default_lr)
    tokens_per_step = sizes.micro_batch_tokens * sizes.micro_steps * world.size
    return sizes, max(1, math.ceil(train.num_tokens / tokens_per_step))


def add_residual_dropout(model: PreTrainedModel, rate: float) -> None:
    """Apply dropout with this rate to the attention and MLP outputs of every block (residual dropout, arXiv 1706.03762,
    section 5.4).

    Raises:
        ConfigError: the output layers of the model's blocks have other names.
    """
    if not rate:
        return
    layers = [module for name, module in model.named_modules() if name.endswith(("o_proj", "down_proj"))]
    if not layers:
        raise ConfigError(
            f"head.block_dropout is {rate:g}, and {type(model).__name__} has no o_proj or down_proj",
            "leave head.block_dropout at 0",
        )
    for layer in layers:
        layer.register_forward_hook(lambda module, _, out: F.dropout(out, rate, module.training))
