"""`anabatic sft`: fine-tune a causal language model on conversations; only what the assistant says is learned."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from anabatic.config.curriculum import Curriculum
from anabatic.config.sft import SftJob
from anabatic.config.shared import require
from anabatic.config.train import TuneJob
from anabatic.config.tuner import Lora
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder
from anabatic.data import curriculum, padded, sample, templates
from anabatic.data import tokenizer as tokenizers
from anabatic.data.learn import Learning, Turns
from anabatic.data.pairs import longest
from anabatic.data.shard_set import ShardSet
from anabatic.device.device import Device
from anabatic.evals import difficulty
from anabatic.models import adapter, adapter_config, fuse, reward, stack, stored, tensor
from anabatic.models.forward import Root
from anabatic.models.hf import base_of, below, fill, load_config, recompute, require_fit, resolve, skeleton
from anabatic.models.hf import tokenizer_folder as topmost
from anabatic.models.place import format_of, place
from anabatic.models.preference import Objective
from anabatic.models.reward import RewardObjective
from anabatic.models.stack import Share
from anabatic.parallel.shard import Division, settle
from anabatic.parallel.world import World, barrier
from anabatic.plan import layers
from anabatic.plan.depth import Plan
from anabatic.recipes.begin import begun, say_plan
from anabatic.recipes.training import Corpus, Training, corpus, require_chats
from anabatic.train import auto, goal, paper
from anabatic.train import plan as planning
from anabatic.train.optim import Rates


def _learning(job: SftJob) -> Learning:
    turns: Turns = "all" if job.train_on_inputs else "last" if job.last_turn_only else "assistant"
    return Learning(turns, job.truncation_strategy)


def _skeleton(job: TuneJob, named: Path, base: Path, device: Device) -> tuple[PreTrainedModel, Lora | None]:
    """Return the model without memory, what is trained requiring gradients, and the adapter's settings if it is one.

    What is frozen is kept in the format of the matrix products, what is trained as `optim.weights` says.
    """
    trained = format_of(job.optim, device)
    tuner = job.tuner
    if tuner == "auto":
        tuner = "full" if named == base else "lora"
    for section, needed in (("lora", "lora"), ("freeze", "freeze")):
        if tuner != needed and getattr(job, section) != type(getattr(job, section))():
            log.warn(f"tuner is {tuner}: the settings of {section} are not used")
    model = skeleton(base, trained if tuner == "full" else device.dtype)
    lora = None
    if named != base:
        layers.require_goes_on(named, job.tuner)
        lora = adapter.prepare(model, named)
        unused = job.lora != Lora()
        told = "; the settings of lora are not used: it goes on as it is" if unused else ""
        (log.warn if unused else log.info)(f"going on with the adapter {named} of rank {lora.r}{told}")
    elif tuner == "lora":
        lora = job.lora
        targets = adapter.insert(model, lora)
        log.info(f"LoRA of rank {lora.r} in {len(targets)} layers, scaled by {adapter.scale_of(lora):g}")
    elif tuner == "freeze":
        adapter.freeze(model, job.freeze)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    recompute(model, job.recompute)
    return model, lora


def packed(
    job: TuneJob, model: PreTrainedModel, named: Path, lora: Lora | None, shares: list[Share], division: Division
) -> None:
    """Hold the frozen weights in few bits, if asked for. They are whole on every device, and stay as they are."""
    if job.quantize == "none":
        return
    what = f"quantize is {job.quantize}"
    require(lora is not None, f"{what}, and the model itself is trained", "use --tuner lora, or --quantize none")
    require(lora is None or not lora.use_dora, f"{what}, and {named} has DoRA", "use --quantize none")
    require(not shares, f"{what}, and adapters become part of the weights", "merge them first with `anabatic merge`")
    require(
        not division.sharded,
        f"{what}, parallel.strategy is {division.strategy}, which divides the weights",
        "packed weights are whole on every device: use ddp, or --quantize none",
    )
    require(
        job.parallel.tensor == 1,
        f"{what}, parallel.tensor is {job.parallel.tensor}, which divides the layers",
        "packed weights are whole on every device: leave parallel.tensor out, or use --quantize none",
    )
    log.info(f"{adapter.pack(model, job.quantize)} linear layers are frozen in {job.quantize}")


def require_weights(named: Path, base: Path) -> None:
    """The files of the weights are opened before the rows are read."""
    stored.require_files(base)
    if named != base:
        adapter_config.require_weights(named)


def _by_loss(
    data: Corpus, lessons: Curriculum, root: Root, job: TuneJob, micro_batch_tokens: int, device: Device, world: World,
    folder: RunFolder, continues: bool,
) -> Corpus:  # fmt: skip
    """Part the rows into levels by what the model, as it is before the training, makes of them."""
    parts = [part for part, _ in data.train if isinstance(part, ShardSet)]
    require_chats(parts, lessons.by)
    found = difficulty.losses(root, parts, job.batch.length, micro_batch_tokens, device, world, folder.root, continues)
    levels = curriculum.by_values(parts, found, lessons.levels())
    return Corpus([(part, None) for part, _ in levels.sets], data.valid, levels)


@dataclass
class Opened:
    """A model to be trained, without memory, with what belongs to it.

    Attributes:
        named: its folder, perhaps an adapter's; base: the one with the weights; shares: adapters that go into them.
        lora: settings of the adapter that is trained; None: the model itself is.
    """

    named: Path
    base: Path
    shares: list[Share]
    tokenizer_folder: Path
    tokenizer: Any
    model: PreTrainedModel
    lora: Lora | None


def opened(job: TuneJob, device: Device, world: World) -> Opened:
    """Find the model of a job and build it without memory."""
    named = resolve(job.model, job.hub, world)
    base = base_of(named, job.hub, world)
    shares = below(job.adapter, named, job.hub, world)
    own = Path(job.tokenizer) if job.tokenizer else topmost(named, shares)
    folder = templates.folder_with(own, job.chat_template)
    tokenizer = tokenizers.load(folder)
    require_fit(load_config(base), tokenizer, folder, job.batch.length)
    return Opened(named, base, shares, folder, tokenizer, *_skeleton(job, named, base, device))


def filled(job: TuneJob, found: Opened, division: Division, device: Device, world: World) -> Root:
    """Bring it to where it is trained and give it its first weights."""
    root = place(found.model, division, device, world)
    fill(found.model, found.base)
    stack.merge(found.model, found.shares)
    if found.named != found.base:
        adapter.load(found.model, found.named)
    elif found.lora is not None:
        adapter.begin(found.model, found.lora, job.seed)
    return root


def run(job: SftJob) -> int:
    """Fine-tune as the job says; return the exit code."""
    return tune(job, _learning(job), full_lr=2e-5, adapter_lr=1e-4, lessons=job.curriculum)


def tune(
    job: TuneJob,
    learning: Learning,
    *,
    full_lr: float,
    adapter_lr: float,
    lessons: Curriculum | None = None,
    objective: Objective | RewardObjective | None = None,
) -> int:
    """Train an existing model on conversations, or on pairs of them; return the exit code.

    Args:
        full_lr, adapter_lr: learning rates where the job names none.
        objective: of pairs; None: next-token prediction.

    Raises:
        ConfigError: a reward model would begin as an adapter.
    """
    with begun(job) as (job, folder, device, world, found):
        if lessons is not None and not lessons.use and lessons != Curriculum():
            log.warn("curriculum.use is false: the other settings of curriculum are not used")
        # Before the rows are read, which may take long: what is wrong with the settings is told here.
        start = opened(job, device, world)
        named, base, shares, model, lora = start.named, start.base, start.shares, start.model, start.lora
        tokenizer, judges = start.tokenizer, isinstance(objective, RewardObjective)
        if judges:
            require(named == base, f"{named} is an adapter", "merge it first with `anabatic merge`, or use --adapter")
            reward.attach(model, format_of(job.optim, device))
        tensor.require_divisible(model, world.tensor.size)
        division = settle(job.parallel, world, device)
        packed(job, model, named, lora, shares, division)
        require_weights(named, base)
        data = corpus(job.data, start.tokenizer_folder, world, job.batch.length, learning, lessons)
        parts = data.tokenised
        if learning.pairs:
            _require_chats([*parts, *(data.valid or [])], learning.labels)
        if world.first:
            sample.say(parts, tokenizer, job.log.samples)
        if not job.batch.packing:
            padded.require_rows(parts)
        for part in parts:
            if not part.is_chat:
                log.warn(f"{part.name} is plain text without turns: all of it is learned")

        root = filled(job, start, division, device, world)
        if judges:
            reward.begin(model, job.seed)
        log.info(fuse.settle(model, job.fused, device.type))
        plan = Plan()
        epoch_tokens = sum(part.num_tokens for part in parts)
        tokens = (job.schedule.epochs or 1.0) * epoch_tokens
        lr = full_lr if lora is None else adapter_lr
        whole = longest(job.batch.length) if learning.pairs else None
        sizes = planning.settle(
            plan, job, model, epoch_tokens, tokens, "one epoch", paper.of_model(job, model, device, world.data),
            lr, device, world.data, whole, auto.batch_of(job, auto.state_of(job, world)),
        )  # fmt: skip
        if not job.batch.packing:
            passing = padded.one_pass(parts, job.batch.length, sizes.micro_batch_tokens, job.seed)
            sizes = planning.padded(plan, job.schedule, sizes, *passing, world.data)
        say_plan(plan, model, world, division)

        if lessons is not None and lessons.use and lessons.by == "loss":
            data = _by_loss(
                data, lessons, root, job, sizes.micro_batch_tokens, device, world, folder, found is not None
            )
        training = Training(job, folder, device, world, root, division, tokenizer, data, plan, sizes, found)
        training.chat = bool(tokenizer.chat_template)
        training.lora, training.base, training.shares, training.lessons = lora, base, shares, lessons
        _aim(training, objective)
        code = training.go()
    return code


def _require_chats(parts: Sequence[Any], labels: bool) -> None:
    for part in parts:
        if not part.is_chat and labels:
            raise DataError(f"{part.name} is plain text, not answers with labels", "name rows of messages and label")
        if not part.is_chat:
            raise DataError(f"{part.name} is plain text, not pairs of answers", "name rows of chosen and rejected")


def _aim(training: Training, objective: Objective | RewardObjective | None) -> None:
    """Tell a training what it learns of pairs, and how that is saved."""
    root, device, world, seq_len = training.root, training.device, training.world, training.job.batch.length
    if isinstance(objective, RewardObjective):
        training.goal = goal.rewards(root, device, world, seq_len, objective)
        training.rates = Rates(reward.PREFIX)
        training.writes = functools.partial(_write_reward, training)
    elif objective is not None:
        training.goal = goal.preference(root, device, world, seq_len, objective)


def _write_reward(training: Training, folder: Path) -> None:
    model, tokenizer, first = training.root.model, training.tokenizer, training.world.first
    if training.lora is None or training.base is None:
        reward.save(model, folder, tokenizer, first)
    else:
        more = stack.record(training.shares)
        reward.save_adapter(model, folder, tokenizer, training.lora, training.base, first, more)
    barrier(training.world)
