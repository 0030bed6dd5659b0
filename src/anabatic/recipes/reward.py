"""`anabatic reward`: train a reward model on preference pairs."""

from __future__ import annotations

from anabatic.config.reward import RewardJob
from anabatic.data.learn import Learning
from anabatic.models.reward import RewardObjective
from anabatic.recipes.sft import tune


def run(job: RewardJob) -> int:
    """Train as the job says; return the exit code."""
    learning = Learning("assistant", job.truncation_strategy, pairs=True, closed=True)
    objective = RewardObjective(job.center_rewards_coefficient)
    return tune(job, learning, full_lr=1e-5, adapter_lr=1e-4, objective=objective)
