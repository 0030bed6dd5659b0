"""`anabatic sft`: fine-tune a causal language model on conversations; only what the assistant says is trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anabatic.config.sections.common import DerivedSizes
from anabatic.config.sections.train_jobs import Curriculum, TuneJob
from anabatic.config.sft import SftJob
from anabatic.core import log
from anabatic.data.batching import curriculum, padding
from anabatic.data.chat import loss_preview
from anabatic.data.chat.loss_mask import LossPolicy, LossTurns
from anabatic.data.shards.reader import ShardSet
from anabatic.evals import difficulty
from anabatic.models import division, fused_ops
from anabatic.models.forward import ModelRoot
from anabatic.parallel.sharding import divides_model, resolve_sharding
from anabatic.recipes.training.session import find_resolved_batch, log_plan, training_session
from anabatic.recipes.training.trained_model import (
    TrainableModel,
    TrainedModel,
    build_model,
    load_weights,
    make_model_saver,
    quantize_frozen,
    require_weight_files,
)
from anabatic.recipes.training.trainer import Trainer
from anabatic.recipes.training.training_data import (
    DatasetBatches,
    TrainingData,
    build_training_data,
    require_conversations,
)
from anabatic.train import sizing
from anabatic.train.context import TrainContext
from anabatic.train.objectives import Objective, make_next_token_objective, see_pictures
from anabatic.train.optim.optimizer import HeadRates
from anabatic.train.sizing import Horizon, StepSizes


@dataclass(frozen=True)
class FinetuneTask:
    """What a fine-tuning is for: next-token prediction; preferences and reward models override what differs.

    Attributes:
        policy: which tokens are targets.
        full_lr, adapter_lr: learning rates where the job names none.
    """

    policy: LossPolicy
    full_lr: float
    adapter_lr: float
    curriculum: Curriculum | None = None
    head_rates: HeadRates = HeadRates()

    def prepare_model(self, context: TrainContext[TuneJob], start: TrainableModel) -> None:
        """Change the model before it has memory: its own head, for example."""

    def init_weights(self, context: TrainContext[TuneJob], start: TrainableModel) -> None:
        """Initialize what no file has weights for."""

    def require_rows(self, parts: Sequence[Any]) -> None:
        """Make sure that the sources have what the objective needs."""

    def max_segment(self, seq_len: int) -> int | None:
        """Return the inputs of the longest row that is not split; None: segments of `seq_len`."""
        return None

    def make_objective(self, context: TrainContext[TuneJob], root: ModelRoot) -> Objective:
        """Return what is learned."""
        return make_next_token_objective(root, context.device, context.world, context.seq_len)

    def make_saver(self, context: TrainContext[TuneJob], start: TrainableModel) -> Callable[[Path], None]:
        """Return what writes a folder of the model as it is."""
        return make_model_saver(start, context.world)


def run(job: SftJob) -> int:
    """Fine-tune as the job says; return the exit code."""
    turns: LossTurns = "all" if job.train_on_inputs else "last" if job.last_turn_only else "assistant"
    policy = LossPolicy(turns, job.truncation_strategy)
    return finetune_model(job, FinetuneTask(policy, full_lr=2e-5, adapter_lr=1e-4, curriculum=job.curriculum))


def finetune_model(job: TuneJob, task: FinetuneTask) -> int:
    """Train an existing model further; return the exit code."""
    with training_session(job) as context:
        job, device, world, lessons = context.job, context.device, context.world, task.curriculum
        if lessons is not None and not lessons.use and lessons != Curriculum():
            log.warn("curriculum.use is false: the other settings of curriculum are not used")
        # Before the rows are read, which may take long: what is wrong with the settings is reported here.
        start = build_model(job, context.model, device, world)
        task.prepare_model(context, start)
        sharding, is_divided = resolve_sharding(job.parallel, world, device), divides_model(world)
        if is_divided:
            division.require_divisible(start.model, world)
        if job.quantize != "none":
            quantize_frozen(job, start)
        require_weight_files(start)
        seq_len = job.batch.resolved_seq_len
        data = build_training_data(
            job.data, start.tokenizer_folder, world, seq_len, task.policy, lessons, start.pictures
        )
        _check_rows(context, task, data, start)

        root = load_weights(job, start, sharding, device, world)
        task.init_weights(context, start)
        log.info(fused_ops.apply_fused_setting(start.model, job.fused, device.type))
        plan = DerivedSizes()
        sizes = _resolve_sizes(context, task, plan, start, data)
        log_plan(plan, start.model, world, sharding, sizes.micro_steps)
        data = _split_by_loss(context, data, root, sizes.micro_batch_tokens)

        model = TrainedModel(
            root,
            sharding,
            start.tokenizer,
            task.make_saver(context, start),
            is_chat=bool(start.tokenizer.chat_template),
            head_rates=task.head_rates,
        )
        objective = task.make_objective(context, root)
        if start.pictures is not None:
            objective = see_pictures(objective, start.pictures)
        code = Trainer(context, model, objective, DatasetBatches(context, data), plan, sizes).train_and_save()
    return code


def _check_rows(context: TrainContext[TuneJob], task: FinetuneTask, data: TrainingData, start: TrainableModel) -> None:
    """Refuse rows that the objective cannot use, and show what is trained on of the first ones."""
    parts = data.token_sets
    task.require_rows([*parts, *(data.valid or [])])
    if context.world.is_main_process:
        loss_preview.log_conversations(parts, start.tokenizer, context.job.log.samples)
    if not context.job.batch.packing:
        padding.require_rows(parts)
    for part in parts:
        if not part.is_chat:
            log.warn(f"{part.name} is plain text without turns: all of it is learned")


def _resolve_sizes(
    context: TrainContext[TuneJob],
    task: FinetuneTask,
    plan: DerivedSizes,
    start: TrainableModel,
    data: TrainingData,
) -> StepSizes:
    job, world, parts = context.job, context.world, data.token_sets
    epoch_tokens = sum(part.num_tokens for part in parts)
    sizes = sizing.resolve_sizes(
        job,
        context.device,
        world.data_group,
        plan,
        start.model,
        Horizon(epoch_tokens, (job.schedule.epochs or 1.0) * epoch_tokens, "one epoch"),
        task.full_lr if start.lora is None else task.adapter_lr,
        task.max_segment(context.seq_len),
        find_resolved_batch(context),
    )
    if job.batch.packing:
        return sizes
    batches = padding.estimate_epoch_batches(parts, context.seq_len, sizes.micro_batch_tokens, job.seed)
    return sizing.recount_padded_steps(plan, job.schedule, sizes, *batches, world.data_group)


def _split_by_loss(
    context: TrainContext[TuneJob], data: TrainingData, root: ModelRoot, micro_batch_tokens: int
) -> TrainingData:
    """Split the rows into levels by the loss of the model as it is before the training, where the curriculum asks."""
    lessons = data.curriculum
    if lessons is None or not lessons.use or lessons.by != "loss":
        return data
    parts = [part for part, _ in data.train if isinstance(part, ShardSet)]
    require_conversations(parts, lessons.by)
    losses = difficulty.load_or_measure_losses(
        root,
        parts,
        context.seq_len,
        micro_batch_tokens,
        context.device,
        context.world,
        context.folder.root,
        context.resume_checkpoint is not None,
    )
    levels = curriculum.split_by_value(parts, losses, lessons.level_names())
    return replace(data, train=[(part, None) for part, _ in levels.leveled_sets], levels=levels)
