"""`anabatic dpo`: train on preference pairs. The reference is the model as it was before."""

from __future__ import annotations

from anabatic.config.dpo import DpoJob
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.models.preference_loss import PreferenceOptions
from anabatic.recipes.training.sft import finetune_model


def run(job: DpoJob) -> int:
    """Train as the job says; return the exit code."""
    learning = LossPolicy("assistant", job.truncation_strategy, pairs=True, labels=job.loss_type == "kto")
    objective = PreferenceOptions(
        job.resolved_beta,
        job.loss_type,
        job.label_smoothing,
        job.rpo_alpha or 0.0,
        job.simpo_gamma,
        job.desirable_weight,
        job.undesirable_weight,
    )
    return finetune_model(job, learning, full_lr=1e-6, adapter_lr=1e-5, objective=objective)
