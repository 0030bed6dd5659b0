"""`anabatic classify pretrain`: pre-training on vessel words without labels, before a classifier is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.data.sequence.dataset import TargetSampler
from anabatic.models import fused_ops, pretrained
from anabatic.models.model_init import materialize_model, resolve_weight_dtype
from anabatic.parallel.collectives import barrier
from anabatic.parallel.sharding import resolve_sharding
from anabatic.recipes.training.session import log_plan, training_session
from anabatic.recipes.training.trained_model import TrainedModel
from anabatic.recipes.training.trainer import Trainer
from anabatic.recipes.training.training_data import DatasetBatches, TrainingData
from anabatic.train import objectives
from anabatic_vessels.config.train import ClassifyPretrainJob
from anabatic_vessels.io import vessel_splits
from anabatic_vessels.model import initialization
from anabatic_vessels.words import encoding
from anabatic_vessels.words.encoding import MASK_GROUPS
from anabatic_vessels.words.masking import NextWordTargets, WordMasking
from anabatic_vessels.words.vocabulary import WordSpec
from anabatic_vessels.words.word_tokenizer import MASK_TOKEN, WordEncoder


def run(job: ClassifyPretrainJob) -> int:
    """Run the training job; return the exit code."""
    with training_session(job) as context:
        job, device, world = context.job, context.device, context.world
        base = vessel_splits.read_base_model_info(job.model.path)
        vessels = vessel_splits.read_vessel_segments(job, base)
        tokenizer, num_known = encoding.build_word_tokenizer(base, vessels.spec)
        encoder = WordEncoder.from_tokenizer(tokenizer)
        samplers = [make_target_sampler(job, encoder, vessels.spec, seed) for seed in (job.seed, job.seed + 1)]
        options: dict[str, Any] = {"seq_len": context.seq_len}
        train = encoding.encode_segments("training vessels", vessels.train, encoder, sampler=samplers[0], **options)
        valid = encoding.encode_segments("held-out vessels", vessels.valid, encoder, sampler=samplers[1], **options)
        log_mask_rates(samplers[0], train)

        plan, model = initialization.build_meta_model(
            job, base, len(tokenizer), resolve_weight_dtype(job.optim, device)
        )
        sharding = resolve_sharding(job.parallel, world, device)
        root = materialize_model(model, sharding, device, world)
        initialization.init_or_load_weights(model, job, base, num_known, len(tokenizer))
        log.info(fused_ops.apply_fused_setting(model, job.fused, device.type))
        sizes, steps_per_epoch = initialization.resolve_step_sizes(context, plan, model, train, base)
        log_plan(plan, model, world, sharding)

        causal = job.objective != "masked"
        objective = objectives.make_word_objective(root, device, world, context.seq_len, causal)
        extra_files = vessel_splits.word_model_files(vessels, "causal" if causal else "both")

        def save_folder(path: Path) -> None:
            pretrained.save_model(
                model,
                path,
                tokenizer,
                world.is_main_process,
                lambda folder: vessel_splits.write_word_model_files(folder, extra_files),
            )
            barrier(world)

        context = replace(context, job=replace(job, eval=replace(job.eval, every=job.eval.every or steps_per_epoch)))
        data = TrainingData([(train, None)], [valid] if vessels.valid else None)
        trained = TrainedModel(root, sharding, tokenizer, save_folder)
        code = Trainer(context, trained, objective, DatasetBatches(context, data), plan, sizes).train_and_save()
    return code


def make_target_sampler(job: ClassifyPretrainJob, encoder: WordEncoder, spec: WordSpec, seed: int) -> TargetSampler:
    """Return the sampler of inputs and targets of a sequence."""
    if job.objective == "next":
        return NextWordTargets()
    mask = job.mask
    groups = encoding.mask_group_ids(encoder, spec)
    group_weights = np.asarray([mask.h3, mask.class_word, mask.motion, mask.other])
    if not (groups >= 0).any():
        raise ConfigError(f"words {spec.spec_name} have none that may be hidden", "use --objective next")
    is_source = job.objective == "source"
    return WordMasking(
        groups,
        group_weights / group_weights.sum(),
        mask.ratio,
        encoder.vocab[MASK_TOKEN],
        seed,
        shift_targets=not is_source,
        is_independent=is_source,
    )


def log_mask_rates(sampler: TargetSampler, train: Any) -> None:
    """Log the fraction of masked words of each group in some sequences."""
    if not isinstance(sampler, WordMasking):
        return
    for index in range(min(200, train.num_docs)):
        train.read_segment(train.locate_entry(index), 0, train.locate_entry(index).num_inputs)
    eligible = max(1, sampler.masked_counts[None])
    hidden = {name: sampler.masked_counts[index] for index, name in enumerate(MASK_GROUPS)}
    total = sum(hidden.values())
    summary = ", ".join(f"{name} {count / max(1, total):.0%}" for name, count in hidden.items())
    log.info(f"{total / eligible:.1%} of the words that may be hidden are: {summary}")
