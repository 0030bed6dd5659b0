"""`anabatic sft`: fine-tune a causal language model on conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import Schedule, require_setting
from anabatic.config.sections.train_jobs import Curriculum, TuneJob, WithAuto


def _default_schedule() -> Schedule:
    return Schedule(epochs=1.0, warmup_ratio=0.03, decay_ratio=0.97)


@dataclass(kw_only=True)
class SftJob(TuneJob, WithAuto):
    """Fine-tune on conversations; only the assistant's tokens are targets."""

    out: str = "runs/sft"
    """Run folder."""
    train_on_inputs: bool = False
    """Also compute the loss on user and system tokens."""
    last_turn_only: bool = False
    """Train only on the assistant's last turn."""
    truncation_strategy: Literal["right", "left", "delete", "split"] = "right"
    """A conversation of more than batch.seq_len tokens loses its end or its beginning, is left out, or is split."""
    curriculum: Curriculum = field(default_factory=Curriculum)
    schedule: Schedule = field(default_factory=_default_schedule)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batch.packing:
            what = "device.compile is on, and padded batches have another shape each"
            require_setting(self.device.compile != "on", what, "set device.compile to off, or batch.packing to true")
        require_setting(
            not self.curriculum.use or self.schedule.minutes is None,
            "curriculum.use is on and schedule.minutes is given: the stages are shares of a number of steps",
            "give schedule.epochs or schedule.max_steps in place of schedule.minutes",
        )
        both = self.train_on_inputs and self.last_turn_only
        require_setting(not both, "train_on_inputs and last_turn_only are both set", "use one of them")
        require_setting(
            bool(self.data.train), "data.train is empty", "give --data.train FILE.jsonl with `messages` rows"
        )
