"""`anabatic reward`: train a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.dpo import require_room_for_pairs
from anabatic.config.sections.common import Schedule, require_setting
from anabatic.config.sections.plan_facts import PlanFacts
from anabatic.config.sections.train_jobs import TuneJob, WithAuto


def _default_schedule() -> Schedule:
    return Schedule(epochs=1.0, warmup_ratio=0.1, decay_ratio=0.9)


@dataclass(kw_only=True)
class RewardJob(TuneJob, WithAuto):
    """Train a model that says how good an answer is, on pairs of a better and a worse one."""

    out: str = "runs/reward"
    """Run folder."""
    center_rewards_coefficient: float = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps them around 0 (arXiv 2312.09244); 0.01 is common."""
    truncation_strategy: Literal["right", "left", "delete"] = "left"
    """A conversation of more than batch.seq_len - 1 tokens loses its end or its beginning; delete: the pair is left
    out."""
    schedule: Schedule = field(default_factory=_default_schedule)

    def __post_init__(self) -> None:
        super().__post_init__()
        coefficient = self.center_rewards_coefficient
        require_setting(
            coefficient >= 0, f"center_rewards_coefficient is {coefficient}", "use 0 or more; 0.01 is common"
        )
        require_setting(
            not self.lora.modules_to_save,
            f"lora.modules_to_save is {', '.join(self.lora.modules_to_save)}",
            "the adapter of a reward model brings its head and nothing else: leave it out",
        )
        require_room_for_pairs(self)

    def get_plan_facts(self) -> PlanFacts:
        """Both sides of a pair are in one micro-batch; the head is of one output."""
        return PlanFacts(indivisible_tokens=2 * self.batch.resolved_seq_len, has_lm_head=False)
