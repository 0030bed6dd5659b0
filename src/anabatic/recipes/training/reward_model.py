"""`anabatic reward`: train a reward model on preference pairs."""

from __future__ import annotations

from anabatic.config.reward import RewardJob
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.models.reward_head import RewardOptions
from anabatic.recipes.training.sft import finetune_model


def run(job: RewardJob) -> int:
    """Train as the job says; return the exit code."""
    learning = LossPolicy("assistant", job.truncation_strategy, pairs=True, closed=True)
    objective = RewardOptions(job.center_rewards_coefficient)
    return finetune_model(job, learning, full_lr=1e-5, adapter_lr=1e-4, objective=objective)
