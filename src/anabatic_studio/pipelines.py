"""Pipelines as jobs of the studio: their stages, what is wrong with them, and the devices they need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from anabatic.config.pipeline import PipelineJob
from anabatic.config.sections.common import DeviceSettings
from anabatic.core.errors import AnabaticError, ConfigError
from anabatic.recipes.pipeline import runner, stage_plan

MAX_DESCRIBED_STAGES = 100
_EMPTY_VARIABLE = re.compile(r"vars\.(\S+) is empty")


def check_pipeline(job: PipelineJob) -> tuple[list[dict[str, Any]], list[AnabaticError]]:
    """Return the stages, each with `name`, `command`, `title` and `done` (it would be skipped), and what is wrong.

    Raises:
        ConfigError: the variables are wrong, and with them all stages.
    """
    plans, wrong = stage_plan.plan_stages_with_problems(job, {})
    done = {plan.name for plan in plans if plan.job is not None and stage_plan.compare_stage_state(plan).is_done}
    reasons = {plan.name: "it is not done" for plan in plans if plan.name not in done}
    found = [error for errors in runner.check_stages(plans, reasons, wrong).values() for error in errors]
    problems = [*_report_empty_variables(found), *(error for error in found if not _names_variable(error))]
    stages = [
        {
            "name": name,
            "command": stage.command,
            "title": stage.title,
            "done": name in done,
        }
        for name, stage in list(job.stages.items())[:MAX_DESCRIBED_STAGES]
    ]
    return stages, problems


def _names_variable(error: AnabaticError) -> re.Match[str] | None:
    return _EMPTY_VARIABLE.match(str(error))


def _report_empty_variables(found: Sequence[AnabaticError]) -> list[AnabaticError]:
    """Return one error for each variable that must be given, however many stages use it."""
    names = dict.fromkeys(match[1] for error in found if (match := _names_variable(error)))
    return [
        ConfigError(
            f"vars.{name} is empty, and stages need it",
            "give a file, a folder or another value that the recipe's comments name",
        )
        for name in names
    ]


def find_device_settings(job: PipelineJob) -> DeviceSettings | None:
    """Return the device settings of the stage that needs most devices; None: all stages run without any.

    Stages run one after the other, so the devices of the largest one are enough for all.
    """
    plans, _ = stage_plan.plan_stages_with_problems(job, {})
    sections = [section for plan in plans if (section := getattr(plan.job, "device", None)) is not None]
    return max(sections, key=lambda section: (section.type != "cpu", section.nproc), default=None)
