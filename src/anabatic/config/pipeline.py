"""`anabatic run`: named stages, each a command with its settings, fed by the stages before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anabatic.config.sections.common import require_setting


@dataclass(kw_only=True)
class PipelineStage:
    """One command of the pipeline."""

    command: str = ""
    """`tokenizer train`, `pretrain`, `sft`, `dpo`, `eval`, `chat`."""
    title: str = ""
    """One line for the report."""
    job: dict[str, Any] = field(default_factory=dict)
    """The command's settings; `${stage}` is the folder of an earlier stage, `${name}` an entry of `vars`."""

    def __post_init__(self) -> None:
        hint = "name one, for example `command: pretrain`; an overlay is checked together with the recipe below it"
        require_setting(bool(self.command), "no command", hint)


def scale_minutes(stages: dict[str, PipelineStage], minutes: float, hint: str) -> None:
    """Give all stages with `schedule.minutes` together so many minutes, in the shares that the recipe gives them.

    Args:
        hint: what to do where no stage has such minutes.

    Raises:
        ConfigError: no stage has such minutes.
    """
    timed = {
        name: schedule
        for name, stage in stages.items()
        if isinstance(schedule := stage.job.get("schedule"), dict)
        and isinstance(value := schedule.get("minutes"), (int, float))
        and not isinstance(value, bool)
        and value > 0
    }
    require_setting(bool(timed), "--minutes: no stage of this recipe has schedule.minutes", hint)
    total = sum(schedule["minutes"] for schedule in timed.values())
    for name, schedule in timed.items():
        scaled = round(schedule["minutes"] * minutes / total, 4)
        stages[name].job = {**stages[name].job, "schedule": {**schedule, "minutes": scaled}}


@dataclass(kw_only=True)
class PipelineJob:
    """A whole pipeline."""

    out: str = "runs/pipeline"
    """Folder of the pipeline; each stage has its own folder inside."""
    title: str = ""
    """Heading of the report."""
    vars: dict[str, Any] = field(default_factory=dict)
    """Values that several stages use, or that the user must supply (left empty)."""
    stages: dict[str, PipelineStage] = field(default_factory=dict)
    """Name of the stage -> what it does; they run in this order."""

    def __post_init__(self) -> None:
        require_setting(bool(self.stages), "stages is empty", "add at least one stage with a `command`")
        for name, value in self.vars.items():
            plain = value is None or isinstance(value, (str, int, float))
            require_setting(plain, f"vars.{name} is a {type(value).__name__}", "give one text or number")
            text = str(value).lower() if isinstance(value, bool) else str(value)
            self.vars[name] = "" if value is None else text
