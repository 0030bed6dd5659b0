"""`anabatic reward`: train a reward model on preference pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from anabatic.config.reward import RewardJob
from anabatic.config.sections.common import require_setting
from anabatic.config.sections.train_jobs import TuneJob
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.models import reward_head
from anabatic.models.forward import ModelRoot
from anabatic.models.lora import adapter, merging
from anabatic.models.model_init import resolve_weight_dtype
from anabatic.models.reward_head import RewardOptions
from anabatic.parallel.collectives import barrier
from anabatic.recipes.training.dpo import PairTask
from anabatic.recipes.training.sft import finetune_model
from anabatic.recipes.training.trained_model import TrainableModel, make_file_copier
from anabatic.train.context import TrainContext
from anabatic.train.objectives import Objective, make_reward_objective
from anabatic.train.optim.optimizer import HeadRates


@dataclass(frozen=True)
class RewardTask(PairTask):
    """A head that scores a conversation: the better one of a pair gets more."""

    options: RewardOptions = RewardOptions()

    def prepare_model(self, context: TrainContext[TuneJob], start: TrainableModel) -> None:
        """Put a score head on the model.

        Raises:
            ConfigError: the model is an adapter.
        """
        require_setting(
            not start.is_adapter,
            f"{start.named_folder} is an adapter",
            "merge it first with `anabatic merge`, or use --adapter",
        )
        reward_head.attach_score_head(start.model, resolve_weight_dtype(context.job.optim, context.device))

    def init_weights(self, context: TrainContext[TuneJob], start: TrainableModel) -> None:
        """Draw the head's weights."""
        reward_head.init_score_head(start.model, context.job.seed)

    def make_objective(self, context: TrainContext[TuneJob], root: ModelRoot) -> Objective:
        """Return the reward loss as objective."""
        return make_reward_objective(root, context.device, context.world, context.seq_len, self.options)

    def make_saver(self, context: TrainContext[TuneJob], start: TrainableModel) -> Callable[[Path], None]:
        """Return what writes a folder with the head; of an adapter, the head among its saved modules."""
        merged, world = merging.make_merged_record(start.merged_adapters), context.world
        keep_files = make_file_copier(start)

        def save_folder(folder: Path) -> None:
            first = world.is_main_process
            if start.lora is None:
                reward_head.save_reward_model(start.model, folder, start.tokenizer, first, keep_files)
            else:
                lora = replace(start.lora, modules_to_save=[reward_head.SCORE_NAME])  # as PEFT does
                config = {**merged, "task_type": "SEQ_CLS"}
                adapter.save_adapter(
                    start.model, folder, start.tokenizer, lora, start.base_folder, first, config, keep_files
                )
            barrier(world)

        return save_folder


def run(job: RewardJob) -> int:
    """Train as the job says; return the exit code."""
    policy = LossPolicy("assistant", job.truncation_strategy, pairs=True, closed=True)
    task = RewardTask(
        policy,
        full_lr=1e-5,
        adapter_lr=1e-4,
        head_rates=HeadRates(reward_head.SCORE_PREFIX),
        options=RewardOptions(job.center_rewards_coefficient),
    )
    return finetune_model(job, task)
