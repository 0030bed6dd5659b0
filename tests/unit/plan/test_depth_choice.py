"""`model.depth` that follows from `schedule.minutes`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.config.pretrain import PretrainJob, PretrainModel
from anabatic.config.sections.common import Data, Schedule
from anabatic.device.table import Chip
from anabatic.plan import model_shape
from anabatic.recipes import plan_command

CHIP = Chip("one", 0.5, 16, 40)


def make_job(minutes: float | None, ratio: float | None = None, **model: int) -> PretrainJob:
    schedule = Schedule(minutes=minutes, tokens_per_param=ratio)
    return PretrainJob(tokenizer="NONE", model=PretrainModel(**model), data=Data(train=["stdlib:"]), schedule=schedule)


def count_operations(job: PretrainJob, depth: int, ratio: float) -> float:
    params = model_shape.get_job_shape(model_shape.with_depth(job, depth))[0].multiplying_params
    return 6.0 * params * params * ratio


@pytest.mark.parametrize(("minutes", "ratio", "devices"), [(60, None, 1), (60, None, 8), (1e4, 20, 1), (600, 1.5, 64)])
def test_it_is_the_deepest_that_gets_its_tokens(minutes: float, ratio: float | None, devices: int) -> None:
    job = make_job(minutes, ratio)
    depth = model_shape.choose_depth(job, CHIP, devices)
    there = 60 * minutes * 0.5e12 * 0.3 * devices
    assert depth == 1 or count_operations(job, depth, ratio or 12.0) <= there
    assert there < count_operations(job, depth + 1, ratio or 12.0)


def test_more_time_and_more_devices_make_it_deeper_and_never_more_than_the_largest() -> None:
    depths = [model_shape.choose_depth(make_job(minutes), CHIP, 1) for minutes in (0.01, 1e3, 1e5, 5e5)]
    assert depths == sorted(depths) and depths[0] == 1 and depths[-1] > depths[1]
    assert model_shape.choose_depth(make_job(1e5), CHIP, 8) > depths[2]
    assert model_shape.choose_depth(make_job(5e5, width=64), Chip("huge", 1e9, 64, 1000), 8192) == model_shape.MAX_DEPTH


def test_it_is_left_open_only_with_minutes_and_for_a_new_model() -> None:
    assert model_shape.is_depth_left_open(make_job(5))
    assert not model_shape.is_depth_left_open(make_job(None)) and not model_shape.is_depth_left_open(
        make_job(5, depth=3)
    )
    job = make_job(5)
    job.model.path = "MODEL"
    assert not model_shape.is_depth_left_open(job)
    assert PretrainModel().resolved_depth == 12


def test_the_plan_takes_the_same_depth(tmp_path: Path) -> None:
    vocab = {str(number): number for number in range(500)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}), encoding="utf-8")
    job = make_job(600)
    job.tokenizer = str(tmp_path)
    place = plan_command.Machine(CHIP, 1, 1)
    depth = model_shape.choose_depth(job, CHIP, 1)
    assert f"model.depth {depth}," in plan_command.estimate_job(job, place).shape_source


def test_the_plan_counts_the_steps_that_fit_into_the_minutes() -> None:
    job, place = make_job(600, depth=2), plan_command.Machine(CHIP, 1, 1)
    plan = plan_command.estimate_job(job, place)
    assert plan.steps * plan.choice.step_time.total_seconds == pytest.approx(36_000, rel=1e-3)
    job.schedule.max_steps = 7
    assert plan_command.estimate_job(job, place).steps == 7
