"""`anabatic dpo`: train on preference pairs. The reference is the model as it was before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.config.dpo import DpoJob
from anabatic.config.sections.train_jobs import TuneJob
from anabatic.core.errors import DataError
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.chat.preference_pairs import max_pair_inputs
from anabatic.models.forward import ModelRoot
from anabatic.models.preference_loss import PreferenceOptions
from anabatic.recipes.training.sft import FinetuneTask, finetune_model
from anabatic.train.context import TrainContext
from anabatic.train.objectives import Objective, make_preference_objective


@dataclass(frozen=True)
class PairTask(FinetuneTask):
    """Rows with a better and a worse answer."""

    def max_segment(self, seq_len: int) -> int | None:
        """Return the inputs of the longest pair."""
        return max_pair_inputs(seq_len)

    def require_rows(self, parts: Sequence[Any]) -> None:
        """Refuse plain text.

        Raises:
            DataError: a source is plain text.
        """
        for part in parts:
            if not part.is_chat and self.policy.labels:
                raise DataError(
                    f"{part.name} is plain text, not answers with labels", "name rows of messages and label"
                )
            if not part.is_chat:
                raise DataError(f"{part.name} is plain text, not pairs of answers", "name rows of chosen and rejected")


@dataclass(frozen=True)
class PreferenceTask(PairTask):
    """Favour the better answer more than the model does now."""

    options: PreferenceOptions = PreferenceOptions()

    def make_objective(self, context: TrainContext[TuneJob], root: ModelRoot) -> Objective:
        """Return the preference loss as objective."""
        return make_preference_objective(root, context.device, context.world, context.seq_len, self.options)


def run(job: DpoJob) -> int:
    """Train as the job says; return the exit code."""
    policy = LossPolicy("assistant", job.truncation_strategy, pairs=True, labels=job.loss_type == "kto")
    options = PreferenceOptions(
        job.resolved_beta,
        job.loss_type,
        job.label_smoothing,
        job.rpo_alpha or 0.0,
        job.simpo_gamma,
        job.desirable_weight,
        job.undesirable_weight,
    )
    return finetune_model(job, PreferenceTask(policy, full_lr=1e-6, adapter_lr=1e-5, options=options))
