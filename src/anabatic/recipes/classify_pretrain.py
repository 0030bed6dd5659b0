"""`anabatic classify pretrain`: a model learns how vessels move from words alone, before it learns classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anabatic.config.classify_train import ClassifyPretrainJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.data.masking import Masking, NextWord
from anabatic.data.sequences import Draw
from anabatic.data.word_ids import MASK, WordIds
from anabatic.models import fuse, hf
from anabatic.models.place import format_of, place
from anabatic.parallel.shard import settle
from anabatic.parallel.world import barrier
from anabatic.recipes import classify_data, classify_model, classify_rows
from anabatic.recipes.begin import begun, say_plan
from anabatic.recipes.classify_rows import GROUPS
from anabatic.recipes.training import Corpus, Training
from anabatic.train import goal
from anabatic.trajectory.words import WordSpec


def run(job: ClassifyPretrainJob) -> int:
    """Train as the job says; return the exit code."""
    with begun(job) as (job, folder, device, world, found):
        base = classify_data.base_of(job.model.path)
        vessels = classify_data.read(job, base)
        tokenizer, known = classify_rows.tokenizer_of(base, vessels.spec)
        words = WordIds.of(tokenizer)
        draws = [draw(job, words, vessels.spec, seed) for seed in (job.seed, job.seed + 1)]
        options: dict[str, Any] = {"seq_len": job.batch.length}
        train = classify_rows.sequences("training vessels", vessels.train, words, draw=draws[0], **options)
        valid = classify_rows.sequences("held-out vessels", vessels.valid, words, draw=draws[1], **options)
        say_masks(draws[0], train)

        plan, model = classify_model.skeleton(job, base, len(tokenizer), format_of(job.optim, device))
        division = settle(job.parallel, world, device)
        root = place(model, division, device, world)
        classify_model.fill(model, job, base, known, len(tokenizer))
        log.info(fuse.settle(model, job.fused, device.type))
        sizes, per_pass = classify_model.sizes(plan, job, model, train, base, device, world)
        say_plan(plan, model, world, division)

        training = Training(
            replace(job, eval=replace(job.eval, every=job.eval.every or per_pass)), folder, device, world, root,
            division, tokenizer, Corpus([(train, None)], [valid] if vessels.valid else None), plan, sizes, found,
        )  # fmt: skip
        causal = job.objective != "masked"
        training.goal = goal.words(root, device, world, job.batch.length, causal)
        beside = classify_data.files(vessels, "causal" if causal else "both")

        def write(path: Path) -> None:
            hf.save_model(model, path, tokenizer, world.first, lambda folder: classify_data.write(folder, beside))
            barrier(world)

        training.writes = write
        code = training.go()
    return code


def draw(job: ClassifyPretrainJob, words: WordIds, spec: WordSpec, seed: int) -> Draw:
    """Return what is read and what is learned of a sequence."""
    if job.objective == "next":
        return NextWord()
    mask = job.mask
    groups = classify_rows.groups_of(words, spec)
    shares = np.asarray([mask.h3, mask.class_word, mask.motion, mask.other])
    if not (groups >= 0).any():
        raise ConfigError(f"words {spec.name} have none that may be hidden", "use --objective next")
    source = job.objective == "source"
    return Masking(groups, shares / shares.sum(), mask.ratio, words.known[MASK], seed, shift=not source, apart=source)


def say_masks(drawn: Draw, train: Any) -> None:
    """Say how many words of each group a look at some sequences hides."""
    if not isinstance(drawn, Masking):
        return
    for number in range(min(200, train.num_docs)):
        train.piece(train.entry(number), 0, train.entry(number).length)
    eligible = max(1, drawn.counts[None])
    hidden = {name: drawn.counts[number] for number, name in enumerate(GROUPS)}
    together = sum(hidden.values())
    shares = ", ".join(f"{name} {number / max(1, together):.0%}" for name, number in hidden.items())
    log.info(f"{together / eligible:.1%} of the words that may be hidden are: {shares}")
