"""From easy to hard: which level of difficulty is drawn how often, and when."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as setting
from typing import Literal

from anabatic.config.sections.common import require_setting


@dataclass(kw_only=True)
class CurriculumStage:
    """A part of the training with its own mixture."""

    until: float = 1.0
    """Share of the training at which the stage ends."""
    mix: dict[str, float] = setting(default_factory=dict)
    """Level -> share of the samples; they sum to 1."""


def _default_stages() -> list[CurriculumStage]:
    return [
        CurriculumStage(until=0.3, mix={"explain": 0.8, "reasoning": 0.2}),
        CurriculumStage(until=0.7, mix={"explain": 0.4, "reasoning": 0.4, "topology": 0.2}),
        CurriculumStage(until=1.0, mix={"explain": 0.25, "reasoning": 0.35, "topology": 0.4}),
    ]


@dataclass(kw_only=True)
class Curriculum:
    """Curriculum learning: samples are drawn by level, and the shares of the levels change in stages."""

    use: bool = False
    """Switch it on. Without the field in the data the training is an ordinary one, with a warning."""
    by: Literal["field", "length", "loss"] = "field"
    """field: a column of the rows names the level; length, loss: levels of equal size, shortest rows first, or those
    first that the model finds easiest before the training."""
    field: str = "difficulty"
    """Column with the level."""
    stages: list[CurriculumStage] = setting(default_factory=_default_stages)
    """The stages, first to last; the levels are those that their mixtures name, easiest first."""

    def __post_init__(self) -> None:
        if not self.use:
            return
        require_setting(bool(self.stages), "curriculum.stages is empty", "give at least one stage")
        before = 0.0
        for number, stage in enumerate(self.stages, start=1):
            where = f"curriculum.stages[{number - 1}]"
            fits = before < stage.until <= 1.0
            require_setting(fits, f"{where}.until is {stage.until:g}", f"use a share above {before:g}, at most 1")
            total = sum(stage.mix.values())
            smallest = min(stage.mix.values(), default=0.0)
            require_setting(smallest >= 0.0, f"{where}.mix has the share {smallest:g}", "use shares from 0")
            require_setting(abs(total - 1.0) < 1e-6, f"{where}.mix sums to {total:g}", "make its shares sum to 1")
            before = stage.until
        require_setting(
            abs(before - 1.0) < 1e-9, f"the last stage of curriculum.stages ends at {before:g}", "end it at 1"
        )

    def level_names(self) -> list[str]:
        """Names of the levels in the order in which the stages name them."""
        return list(dict.fromkeys(level for stage in self.stages for level in stage.mix))
