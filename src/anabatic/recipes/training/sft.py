"""`anabatic sft`: fine-tune a causal language model on conversations; only what the assistant says is learned."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from anabatic.config.sections.common import require_setting
from anabatic.config.sections.curriculum import Curriculum
from anabatic.config.sections.train_jobs import TuneJob
from anabatic.config.sections.tuner import Lora
from anabatic.config.sft import SftJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder
from anabatic.data.batching import curriculum, padding
from anabatic.data.chat import custom_templates, loss_preview
from anabatic.data.chat.loss_mask import LossPolicy, LossTurns
from anabatic.data.chat.preference_pairs import max_pair_inputs
from anabatic.data.shards.reader import ShardSet
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.device.device import Device
from anabatic.evals import difficulty
from anabatic.models import reward_head, tensor_parallel, weights_reader
from anabatic.models.forward import ModelRoot
from anabatic.models.fused import installer
from anabatic.models.lora import adapter, adapter_config, merging
from anabatic.models.lora.merging import WeightedAdapter
from anabatic.models.materialize import materialize_model, resolve_weight_dtype
from anabatic.models.preference_loss import PreferenceOptions
from anabatic.models.pretrained import (
    build_meta_causal_lm,
    enable_activation_checkpointing,
    load_config,
    load_folder_weights,
    require_tokenizer_fits,
    resolve_base_folder,
    resolve_merged_adapters,
    resolve_model_folder,
)
from anabatic.models.pretrained import find_tokenizer_folder as topmost
from anabatic.models.reward_head import RewardOptions
from anabatic.parallel.process_groups import World, barrier
from anabatic.parallel.sharding import ShardingPlan, resolve_sharding
from anabatic.plan import trainable_layers
from anabatic.plan.depth_dial import DerivedSizes
from anabatic.recipes.training.session import log_plan, training_session
from anabatic.recipes.training.trainer import Trainer, TrainingData, build_training_data, require_conversations
from anabatic.train import auto_sizing, objectives, plan_inputs
from anabatic.train import sizing as planning
from anabatic.train.optim.optimizer import HeadRates


def _make_loss_policy(job: SftJob) -> LossPolicy:
    turns: LossTurns = "all" if job.train_on_inputs else "last" if job.last_turn_only else "assistant"
    return LossPolicy(turns, job.truncation_strategy)


def _build_meta_model(job: TuneJob, named: Path, base: Path, device: Device) -> tuple[PreTrainedModel, Lora | None]:
    """Return the model without memory, what is trained requiring gradients, and the adapter's settings if it is one.

    What is frozen is kept in the format of the matrix products, what is trained as `optim.weights` says.
    """
    trained = resolve_weight_dtype(job.optim, device)
    tuner = job.tuner
    if tuner == "auto":
        tuner = "full" if named == base else "lora"
    for section, needed in (("lora", "lora"), ("freeze", "freeze")):
        if tuner != needed and getattr(job, section) != type(getattr(job, section))():
            log.warn(f"tuner is {tuner}: the settings of {section} are not used")
    model = build_meta_causal_lm(base, trained if tuner == "full" else device.dtype)
    lora = None
    if named != base:
        trainable_layers.require_adapter_tuner(named, job.tuner)
        lora = adapter.insert_saved_adapter(model, named)
        unused = job.lora != Lora()
        told = "; the settings of lora are not used: it goes on as it is" if unused else ""
        (log.warn if unused else log.info)(f"going on with the adapter {named} of rank {lora.r}{told}")
    elif tuner == "lora":
        lora = job.lora
        targets = adapter.insert_adapter(model, lora)
        log.info(f"LoRA of rank {lora.r} in {len(targets)} layers, scaled by {adapter.compute_scale(lora):g}")
    elif tuner == "freeze":
        adapter.freeze_parameters(model, job.freeze)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(trained)
    enable_activation_checkpointing(model, job.recompute)
    return model, lora


def quantize_frozen(
    job: TuneJob,
    model: PreTrainedModel,
    named: Path,
    lora: Lora | None,
    shares: list[WeightedAdapter],
    division: ShardingPlan,
) -> None:
    """Hold the frozen weights in few bits, if asked for. They are whole on every device, and stay as they are."""
    if job.quantize == "none":
        return
    what = f"quantize is {job.quantize}"
    require_setting(
        lora is not None, f"{what}, and the model itself is trained", "use --tuner lora, or --quantize none"
    )
    require_setting(lora is None or not lora.use_dora, f"{what}, and {named} has DoRA", "use --quantize none")
    require_setting(
        not shares, f"{what}, and adapters become part of the weights", "merge them first with `anabatic merge`"
    )
    require_setting(
        not division.is_sharded,
        f"{what}, parallel.strategy is {division.strategy}, which divides the weights",
        "packed weights are whole on every device: use ddp, or --quantize none",
    )
    require_setting(
        job.parallel.tensor == 1,
        f"{what}, parallel.tensor is {job.parallel.tensor}, which divides the layers",
        "packed weights are whole on every device: leave parallel.tensor out, or use --quantize none",
    )
    log.info(f"{adapter.quantize_frozen_layers(model, job.quantize)} linear layers are frozen in {job.quantize}")


def require_weight_files(named: Path, base: Path) -> None:
    """The files of the weights are opened before the rows are read."""
    weights_reader.require_weight_files(base)
    if named != base:
        adapter_config.require_adapter_weights(named)


def _split_by_loss(
    data: TrainingData,
    lessons: Curriculum,
    root: ModelRoot,
    job: TuneJob,
    micro_batch_tokens: int,
    device: Device,
    world: World,
    folder: RunFolder,
    continues: bool,
) -> TrainingData:
    """Part the rows into levels by what the model, as it is before the training, makes of them."""
    parts = [part for part, _ in data.train if isinstance(part, ShardSet)]
    require_conversations(parts, lessons.by)
    found = difficulty.load_or_measure_losses(
        root, parts, job.batch.resolved_seq_len, micro_batch_tokens, device, world, folder.root, continues
    )
    levels = curriculum.split_by_value(parts, found, lessons.level_names())
    return TrainingData([(part, None) for part, _ in levels.leveled_sets], data.valid, levels)


@dataclass
class TrainableModel:
    """A model to be trained, without memory, with what belongs to it.

    Attributes:
        named_folder: its folder, perhaps an adapter's; base_folder: the one with the weights; merged_adapters: adapters
        that go into them.
        lora: settings of the adapter that is trained; None: the model itself is.
    """

    named_folder: Path
    base_folder: Path
    merged_adapters: list[WeightedAdapter]
    tokenizer_folder: Path
    tokenizer: Any
    model: PreTrainedModel
    lora: Lora | None


def build_model(job: TuneJob, device: Device, world: World) -> TrainableModel:
    """Find the model of a job and build it without memory."""
    named = resolve_model_folder(job.model, job.hub, world)
    base = resolve_base_folder(named, job.hub, world)
    shares = resolve_merged_adapters(job.adapter, named, job.hub, world)
    own = Path(job.tokenizer) if job.tokenizer else topmost(named, shares)
    folder = custom_templates.folder_with_template(own, job.chat_template)
    tokenizer = tokenizers.load_tokenizer(folder)
    require_tokenizer_fits(load_config(base), tokenizer, folder, job.batch.resolved_seq_len)
    return TrainableModel(named, base, shares, folder, tokenizer, *_build_meta_model(job, named, base, device))


def load_weights(
    job: TuneJob, found: TrainableModel, division: ShardingPlan, device: Device, world: World
) -> ModelRoot:
    """Bring it to where it is trained and give it its first weights."""
    root = materialize_model(found.model, division, device, world)
    load_folder_weights(found.model, found.base_folder)
    merging.merge_adapters(found.model, found.merged_adapters)
    if found.named_folder != found.base_folder:
        adapter.load_adapter(found.model, found.named_folder)
    elif found.lora is not None:
        adapter.init_adapter_weights(found.model, found.lora, job.seed)
    return root


def run(job: SftJob) -> int:
    """Fine-tune as the job says; return the exit code."""
    return finetune_model(job, _make_loss_policy(job), full_lr=2e-5, adapter_lr=1e-4, lessons=job.curriculum)


def finetune_model(
    job: TuneJob,
    learning: LossPolicy,
    *,
    full_lr: float,
    adapter_lr: float,
    lessons: Curriculum | None = None,
    objective: PreferenceOptions | RewardOptions | None = None,
) -> int:
    """Train an existing model on conversations, or on pairs of them; return the exit code.

    Args:
        full_lr, adapter_lr: learning rates where the job names none.
        objective: of pairs; None: next-token prediction.

    Raises:
        ConfigError: a reward model would begin as an adapter.
    """
    with training_session(job) as (job, folder, device, world, found):
        if lessons is not None and not lessons.use and lessons != Curriculum():
            log.warn("curriculum.use is false: the other settings of curriculum are not used")
        # Before the rows are read, which may take long: what is wrong with the settings is told here.
        start = build_model(job, device, world)
        named, base, shares, model, lora = (
            start.named_folder,
            start.base_folder,
            start.merged_adapters,
            start.model,
            start.lora,
        )
        tokenizer, judges = start.tokenizer, isinstance(objective, RewardOptions)
        if judges:
            require_setting(
                named == base, f"{named} is an adapter", "merge it first with `anabatic merge`, or use --adapter"
            )
            reward_head.attach_score_head(model, resolve_weight_dtype(job.optim, device))
        tensor_parallel.require_divisible(model, world.tensor_group.size)
        division = resolve_sharding(job.parallel, world, device)
        quantize_frozen(job, model, named, lora, shares, division)
        require_weight_files(named, base)
        data = build_training_data(
            job.data, start.tokenizer_folder, world, job.batch.resolved_seq_len, learning, lessons
        )
        parts = data.token_sets
        if learning.pairs:
            _require_preference_rows([*parts, *(data.valid or [])], learning.labels)
        if world.is_main_process:
            loss_preview.log_conversations(parts, tokenizer, job.log.samples)
        if not job.batch.packing:
            padding.require_rows(parts)
        for part in parts:
            if not part.is_chat:
                log.warn(f"{part.name} is plain text without turns: all of it is learned")

        root = load_weights(job, start, division, device, world)
        if judges:
            reward_head.init_score_head(model, job.seed)
        log.info(installer.apply_fused_setting(model, job.fused, device.type))
        plan = DerivedSizes()
        epoch_tokens = sum(part.num_tokens for part in parts)
        tokens = (job.schedule.epochs or 1.0) * epoch_tokens
        lr = full_lr if lora is None else adapter_lr
        whole = max_pair_inputs(job.batch.resolved_seq_len) if learning.pairs else None
        sizes = planning.resolve_sizes(
            plan,
            job,
            model,
            epoch_tokens,
            tokens,
            "one epoch",
            plan_inputs.build_model_setup(job, model, device, world.data_group),
            lr,
            device,
            world.data_group,
            whole,
            auto_sizing.get_resolved_batch(job, auto_sizing.load_state(job, world)),
        )
        if not job.batch.packing:
            passing = padding.estimate_epoch_batches(
                parts, job.batch.resolved_seq_len, sizes.micro_batch_tokens, job.seed
            )
            sizes = planning.recount_padded_steps(plan, job.schedule, sizes, *passing, world.data_group)
        log_plan(plan, model, world, division)

        if lessons is not None and lessons.use and lessons.by == "loss":
            data = _split_by_loss(
                data, lessons, root, job, sizes.micro_batch_tokens, device, world, folder, found is not None
            )
        training = Trainer(job, folder, device, world, root, division, tokenizer, data, plan, sizes, found)
        training.is_chat = bool(tokenizer.chat_template)
        training.lora, training.base_folder, training.merged_adapters, training.curriculum = lora, base, shares, lessons
        _set_objective(training, objective)
        code = training.train_and_save()
    return code


def _require_preference_rows(parts: Sequence[Any], labels: bool) -> None:
    for part in parts:
        if not part.is_chat and labels:
            raise DataError(f"{part.name} is plain text, not answers with labels", "name rows of messages and label")
        if not part.is_chat:
            raise DataError(f"{part.name} is plain text, not pairs of answers", "name rows of chosen and rejected")


def _set_objective(training: Trainer, objective: PreferenceOptions | RewardOptions | None) -> None:
    """Tell a training what it learns of pairs, and how that is saved."""
    root, device, world, seq_len = training.root, training.device, training.world, training.job.batch.resolved_seq_len
    if isinstance(objective, RewardOptions):
        training.objective = objectives.make_reward_objective(root, device, world, seq_len, objective)
        training.rates = HeadRates(reward_head.SCORE_PREFIX)
        training.model_writer = functools.partial(_save_reward_model, training)
    elif objective is not None:
        training.objective = objectives.make_preference_objective(root, device, world, seq_len, objective)


def _save_reward_model(training: Trainer, folder: Path) -> None:
    model, tokenizer, first = training.root.model, training.tokenizer, training.world.is_main_process
    if training.lora is None or training.base_folder is None:
        reward_head.save_reward_model(model, folder, tokenizer, first)
    else:
        more = merging.make_merged_record(training.merged_adapters)
        reward_head.save_reward_adapter(model, folder, tokenizer, training.lora, training.base_folder, first, more)
    barrier(training.world)
