"""`anabatic dpo`: train a model on preferences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import Schedule, require_setting
from anabatic.config.sections.plan_facts import PlanFacts
from anabatic.config.sections.train_jobs import TuneJob, WithAuto

LossType = Literal["sigmoid", "ipo", "hinge", "kto", "orpo", "simpo"]
_LOSS_SETTINGS = {"simpo_gamma": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
"""Setting -> the loss that has it."""


def _default_schedule() -> Schedule:
    return Schedule(epochs=1.0, warmup_ratio=0.1, decay_ratio=0.9)


@dataclass(kw_only=True)
class DpoJob(TuneJob, WithAuto):
    """Train on pairs of a better and a worse answer: direct preference optimisation and its relatives."""

    out: str = "runs/dpo"
    """Run folder."""
    model: str = ""
    """Hugging Face folder of the model, with tokenizer and chat template, or OWNER/NAME; it is also the reference."""
    beta: float | None = None
    """How strongly the model is held to the reference; for ipo the paper's tau, for orpo its lambda. Default 0.1, for
    simpo 2."""
    loss_type: LossType = "sigmoid"
    """sigmoid: DPO (arXiv 2305.18290); ipo: arXiv 2310.12036, per token; hinge: arXiv 2305.10425; kto: arXiv
    2402.01306, of single answers too; without a reference orpo: arXiv 2403.07691, and simpo: arXiv 2405.14734."""
    simpo_gamma: float = 0.5
    """By how much the better answer has to win; simpo alone."""
    desirable_weight: float = 1.0
    """Weight of good answers; kto alone."""
    undesirable_weight: float = 1.0
    """Weight of bad answers; kto alone. With many more of one kind, the ratio of both weights should make up for it."""
    label_smoothing: float = 0.0
    """Share of the pairs that are assumed to be labelled the wrong way round; sigmoid alone."""
    rpo_alpha: float | None = None
    """Weight of the better answer's cross-entropy per token, added to the loss (arXiv 2404.19733)."""
    truncation_strategy: Literal["right", "left", "delete"] = "right"
    """An answer with its question of more than batch.seq_len tokens loses its end or its beginning; delete: the pair is
    left out."""
    schedule: Schedule = field(default_factory=_default_schedule)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self.resolved_beta > 0, f"beta is {self.beta}", "use a positive number; 0.1 is common")
        for name, loss in _LOSS_SETTINGS.items():
            value = getattr(self, name)
            require_setting(value >= 0, f"{name} is {value}", "use 0 or more")
            changed = value != type(self).__dataclass_fields__[name].default
            problem = f"{name} is {value} with loss_type {self.loss_type}"
            require_setting(not changed or self.loss_type == loss, problem, f"it belongs to loss_type {loss}")
        weights = self.desirable_weight + self.undesirable_weight
        require_setting(weights > 0, "desirable_weight and undesirable_weight are both 0", "nothing would be learned")
        require_setting(
            0.0 <= self.label_smoothing < 0.5,
            f"label_smoothing is {self.label_smoothing}",
            "use a share from 0 up to, not including, 0.5",
        )
        require_setting(
            not self.label_smoothing or self.loss_type == "sigmoid",
            f"label_smoothing is {self.label_smoothing} with loss_type {self.loss_type}",
            "it belongs to loss_type sigmoid",
        )
        plain = self.loss_type not in ("kto", "orpo")
        problem = f"rpo_alpha is {self.rpo_alpha} with loss_type {self.loss_type}"
        require_setting(
            not self.rpo_alpha or plain, problem, "orpo has that term already, and kto no pairs: leave it out"
        )
        require_setting(
            self.rpo_alpha is None or self.rpo_alpha >= 0, f"rpo_alpha is {self.rpo_alpha}", "use 0 or more"
        )
        require_room_for_pairs(self)

    def get_plan_facts(self) -> PlanFacts:
        """Both sides of a pair are in one micro-batch; some losses compare with the first weights."""
        pair_tokens = 2 * self.batch.resolved_seq_len
        return PlanFacts(indivisible_tokens=pair_tokens, has_reference=self.loss_type not in ("orpo", "simpo"))

    @property
    def resolved_beta(self) -> float:
        """`beta`, or what is common for the loss (SimPO, arXiv 2405.14734, table 7: 2 to 10)."""
        return self.beta if self.beta is not None else 2.0 if self.loss_type == "simpo" else 0.1


def require_room_for_pairs(job: TuneJob) -> None:
    """Make sure that a job trains on pairs, and that they fit into its batches.

    Raises:
        ConfigError: they do not.
    """
    single = getattr(job, "loss_type", "") == "kto"
    rows = "an answer and its label, true or false" if single else "two answers"
    require_setting(bool(job.data.train), "data.train is empty", f"give --data.train FILE.jsonl with rows of {rows}")
    what = "answers" if single else "pairs"
    require_setting(
        job.batch.packing, f"batch.packing is false, and {what} are always packed", "leave batch.packing out"
    )
    for name in ("micro_batch_tokens", "global_batch_tokens"):
        value = getattr(job.batch, name)
        require_setting(
            value is None or value >= 2 * job.batch.resolved_seq_len,
            f"batch.{name} is {value}, a pair has up to 2 x batch.seq_len = {2 * job.batch.resolved_seq_len} tokens",
            f"raise batch.{name} or lower batch.seq_len",
        )
