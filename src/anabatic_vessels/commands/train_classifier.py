"""`anabatic classify train`: train a classifier of vessel trajectories, from scratch or from a base model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.core import log
from anabatic.data.sequence.dataset import SequenceDataset
from anabatic.models import classifier, fused_ops
from anabatic.models.classifier import ClassLoss, get_class_head
from anabatic.models.model_init import materialize_model, resolve_weight_dtype
from anabatic.parallel.collectives import barrier
from anabatic.parallel.sharding import resolve_sharding
from anabatic.recipes.training.session import log_plan, training_session
from anabatic.recipes.training.trained_model import TrainedModel
from anabatic.recipes.training.trainer import Trainer
from anabatic.recipes.training.training_data import DatasetBatches, TrainingData
from anabatic.train import objectives
from anabatic.train.optim.optimizer import HeadRates
from anabatic_vessels.config.train import ClassifyTrainJob
from anabatic_vessels.io import classifier_folder, vessel_splits
from anabatic_vessels.io.description import TrajectoryDescription
from anabatic_vessels.io.vessel_splits import VesselSegments
from anabatic_vessels.metrics import classification
from anabatic_vessels.model import baselines, initialization
from anabatic_vessels.words import encoding
from anabatic_vessels.words.word_tokenizer import WordEncoder


def run(job: ClassifyTrainJob) -> int:
    """Run the training job; return the exit code."""
    with training_session(job) as context:
        job, device, world = context.job, context.device, context.world
        base = vessel_splits.read_base_model_info(job.model.path)
        vessels = vessel_splits.keep_labelled_segments(vessel_splits.read_vessel_segments(job, base))
        description = describe_classifier(job, vessels)
        tokenizer, num_known = encoding.build_word_tokenizer(base, vessels.spec)
        encoder = WordEncoder.from_tokenizer(tokenizer)
        weights = encoding.compute_vessel_weights(vessels.train, job.head.vessel_weights)
        options: dict[str, Any] = {"seq_len": job.batch.resolved_seq_len, "features": description.features}
        crop = encoding.make_crop(job.head.crop, encoder, vessels.spec, job.seed)
        train = encoding.encode_segments(
            "training vessels", vessels.train, encoder, weights=weights, crop=crop, **options
        )
        valid = encoding.encode_segments("held-out vessels", vessels.valid, encoder, **options)
        vessel_ids = [row.vessel for row in vessels.valid]

        if description.trees_share == 1 and (job.schedule.epochs or 0) > 1 and not job.schedule.max_steps:
            log.warn(
                f"head.trees_share 1 asks the network for words without numbers alone, and it trains"
                f" {job.schedule.epochs:g} passes for that: --schedule.epochs 1 is enough"
            )

        plan, model = initialization.build_meta_model(
            job, base, len(tokenizer), resolve_weight_dtype(job.optim, device)
        )
        classifier.attach_class_head(model, description)
        sharding = resolve_sharding(job.parallel, world, device)
        root = materialize_model(model, sharding, device, world)
        initialization.init_or_load_weights(model, job, base, num_known, len(tokenizer))
        if base.description == description and base.folder is not None:
            classifier_folder.load_head_weights(model, base.folder)
        else:
            get_class_head(model).init_weights(job.seed, train.feature_tensor)
        initialization.add_residual_dropout(model, job.head.block_dropout)
        log.info(fused_ops.apply_fused_setting(model, job.fused, device.type))
        sizes, steps_per_epoch = initialization.resolve_step_sizes(context, plan, model, train, base)
        log_plan(plan, model, world, sharding)

        trees = baselines.fit_trees(job, train, vessels.train, description)
        mix = baselines.make_probability_mixer(trees, valid, vessels.valid, description)
        loss = ClassLoss(description, device, compute_class_weights(job, train, description), job.head.label_smoothing)
        objective = objectives.make_class_objective(
            root,
            device,
            world,
            job.batch.resolved_seq_len,
            loss,
            valid.num_docs,
            lambda probabilities: compute_scores(mix(probabilities), valid.class_labels, vessel_ids, vessels.classes),
        )
        rates = HeadRates(classifier.HEAD_PREFIX, job.head.backbone_lr, round(job.head.freeze_epochs * steps_per_epoch))
        extra_files: dict[str, str | bytes] = {
            **vessel_splits.word_model_files(vessels, description.attention),
            **trees.file_contents,
        }

        def save_folder(path: Path) -> None:
            classifier_folder.save_classifier(model, path, tokenizer, description, extra_files, world.is_main_process)
            barrier(world)

        context = replace(context, job=replace(job, eval=replace(job.eval, every=job.eval.every or steps_per_epoch)))
        data = TrainingData([(train, None)], [valid] if vessels.valid else None)
        trained = TrainedModel(root, sharding, tokenizer, save_folder, head_rates=rates)
        code = Trainer(context, trained, objective, DatasetBatches(context, data), plan, sizes).train_and_save()
    return code


def describe_classifier(job: ClassifyTrainJob, vessels: VesselSegments) -> TrajectoryDescription:
    """Return the description of the classifier."""
    head = job.head
    return TrajectoryDescription(
        classes=vessels.classes,
        words=vessels.spec.spec_name,
        pooling=head.pooling,
        attention=head.attention,
        dropout=head.dropout,
        features=encoding.feature_names(head.features),
        width=head.width,
        features_dropout=head.features_dropout,
        features_hidden=head.features_hidden,
        seq_len=job.batch.resolved_seq_len,
        trees_share=head.trees_share if head.trees else 0.0,
        vessel_share=head.vessel_share if head.vessel_trees else 0.0,
        points=vessels.windows,
    )


def compute_class_weights(
    job: ClassifyTrainJob, train: SequenceDataset, description: TrajectoryDescription
) -> list[float] | None:
    """Return the weight of each class, 1 on average over the training segments; None: equal weights."""
    counts = np.bincount(train.class_labels, minlength=len(description.classes))
    for name, count in zip(description.classes, counts, strict=True):
        log.info(f"  {name}: {count:,} segments")
    if job.head.class_weights == "none":
        return None
    present = counts > 0
    weights: list[float] = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0).tolist()
    return weights


def compute_scores(
    probabilities: np.ndarray, labels: np.ndarray, vessel_ids: list[str], classes: tuple[str, ...]
) -> dict[str, Any]:
    """Return accuracy and macro-F1 of segments, and of vessels by the pooled probabilities of their segments.

    Args:
        probabilities: `[n, C]`, nan for segments that were not scored; labels: `[n]`; vessel_ids: vessel of each.
    """
    is_scored = ~np.isnan(probabilities[:, 0])
    scored, labels = probabilities[is_scored], labels[is_scored]
    vessel_ids = [name for name, keep in zip(vessel_ids, is_scored.tolist(), strict=True) if keep]
    segments = classification.compute_scores(labels, scored.argmax(1), classes)
    truth, _ = classification.find_majority_truth(labels, vessel_ids)
    vessels = classification.compute_scores(
        truth, classification.pool_by_vessel(scored, vessel_ids)[1].argmax(1), classes
    )
    return {
        "valid_accuracy": segments.accuracy,
        "valid_macro_f1": segments.macro_f1,
        "valid_vessel_accuracy": vessels.accuracy,
        "valid_vessel_macro_f1": vessels.macro_f1,
        "segments": segments.rows,
        "vessels": vessels.rows,
    }
