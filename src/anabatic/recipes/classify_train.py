"""`anabatic classify train`: a classifier of vessel trajectories, from scratch or on top of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from anabatic.config.classify_train import ClassifyTrainJob
from anabatic.core import log
from anabatic.data.sequences import Sequences
from anabatic.data.word_ids import WordIds
from anabatic.models import classifier, fuse
from anabatic.models.classifier import ClassLoss, Description, head_of
from anabatic.models.place import format_of, place
from anabatic.parallel.shard import settle
from anabatic.parallel.world import barrier
from anabatic.recipes import classify_data, classify_model, classify_rows, classify_trees
from anabatic.recipes.begin import begun, say_plan
from anabatic.recipes.classify_data import Vessels
from anabatic.recipes.training import Corpus, Training
from anabatic.train import goal
from anabatic.train.optim import Rates
from anabatic.trajectory import metrics


def run(job: ClassifyTrainJob) -> int:
    """Train as the job says; return the exit code."""
    with begun(job) as (job, folder, device, world, found):
        base = classify_data.base_of(job.model.path)
        vessels = classify_data.labelled(classify_data.read(job, base))
        description = describe(job, vessels)
        tokenizer, known = classify_rows.tokenizer_of(base, vessels.spec)
        words = WordIds.of(tokenizer)
        weights = classify_rows.vessel_weights(vessels.train, job.head.vessel_weights)
        options: dict[str, Any] = {"seq_len": job.batch.length, "features": description.features}
        crop = classify_rows.crop_of(job.head.crop, words, vessels.spec, job.seed)
        train = classify_rows.sequences("training vessels", vessels.train, words, weights=weights, crop=crop, **options)
        valid = classify_rows.sequences("held-out vessels", vessels.valid, words, **options)
        ships = [row.vessel for row in vessels.valid]

        if description.trees_share == 1 and (job.schedule.epochs or 0) > 1 and not job.schedule.max_steps:
            log.warn(
                f"head.trees_share 1 asks the network for words without numbers alone, and it trains"
                f" {job.schedule.epochs:g} passes for that: --schedule.epochs 1 is enough"
            )

        plan, model = classify_model.skeleton(job, base, len(tokenizer), format_of(job.optim, device))
        classifier.attach(model, description)
        division = settle(job.parallel, world, device)
        root = place(model, division, device, world)
        classify_model.fill(model, job, base, known, len(tokenizer))
        if base.description == description and base.folder is not None:
            classifier.fill_head(model, base.folder)
        else:
            head_of(model).begin(job.seed, train.features)
        classifier.drop(model, job.head.block_dropout)
        log.info(fuse.settle(model, job.fused, device.type))
        sizes, per_pass = classify_model.sizes(plan, job, model, train, base, device, world)
        say_plan(plan, model, world, division)

        trees = classify_trees.grow(job, train, vessels.train, description)
        mixed = classify_trees.mixer(trees, valid, vessels.valid, description)
        loss = ClassLoss(description, device, class_weights(job, train, description), job.head.label_smoothing)
        training = Training(
            replace(job, eval=replace(job.eval, every=job.eval.every or per_pass)), folder, device, world, root,
            division, tokenizer, Corpus([(train, None)], [valid] if vessels.valid else None), plan, sizes, found,
        )  # fmt: skip
        training.goal = goal.classes(
            root, device, world, job.batch.length, loss, valid.num_docs,
            lambda probabilities: scores(mixed(probabilities), valid.labels, ships, vessels.classes),
        )  # fmt: skip
        training.rates = Rates(classifier.PREFIX, job.head.backbone_lr, round(job.head.freeze_epochs * per_pass))
        beside: dict[str, str | bytes] = {**classify_data.files(vessels, description.attention), **trees.files}

        def write(path: Any) -> None:
            classifier.save(model, path, tokenizer, description, beside, world.first)
            barrier(world)

        training.writes = write
        code = training.go()
    return code


def describe(job: ClassifyTrainJob, vessels: Vessels) -> Description:
    """Return what the classifier is."""
    head = job.head
    return Description(
        classes=vessels.classes,
        words=vessels.spec.name,
        pooling=head.pooling,
        attention=head.attention,
        dropout=head.dropout,
        features=classify_rows.feature_names(head.features),
        width=head.width,
        features_dropout=head.features_dropout,
        features_hidden=head.features_hidden,
        seq_len=job.batch.length,
        trees_share=head.trees_share if head.trees else 0.0,
        vessel_share=head.vessel_share if head.vessel_trees else 0.0,
        points=vessels.windows,
    )


def class_weights(job: ClassifyTrainJob, train: Sequences, description: Description) -> list[float] | None:
    """Return the weight of each class, 1 on average over the training segments; None: all weigh the same."""
    count = np.bincount(train.labels, minlength=len(description.classes))
    for name, number in zip(description.classes, count, strict=True):
        log.info(f"  {name}: {number:,} segments")
    if job.head.class_weights == "none":
        return None
    there = count > 0
    weights: list[float] = np.where(there, count.sum() / (there.sum() * np.maximum(count, 1)), 0.0).tolist()
    return weights


def scores(probabilities: np.ndarray, labels: np.ndarray, ships: list[str], classes: tuple[str, ...]) -> dict[str, Any]:
    """Return accuracy and macro-F1 of segments, and of vessels by their segments' probabilities together.

    Args:
        probabilities: `[n, C]`, nan where a segment was not asked; labels: `[n]`; ships: the vessel of each.
    """
    asked = ~np.isnan(probabilities[:, 0])
    told, labels = probabilities[asked], labels[asked]
    ships = [name for name, there in zip(ships, asked.tolist(), strict=True) if there]
    segments = metrics.score(labels, told.argmax(1), classes)
    truth, _ = metrics.vessel_truth(labels, ships)
    vessels = metrics.score(truth, metrics.by_vessel(told, ships)[1].argmax(1), classes)
    return {
        "valid_accuracy": segments.accuracy, "valid_macro_f1": segments.macro_f1,
        "valid_vessel_accuracy": vessels.accuracy, "valid_vessel_macro_f1": vessels.macro_f1,
        "segments": segments.rows, "vessels": vessels.rows,
    }  # fmt: skip
