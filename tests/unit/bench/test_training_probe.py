"""What is read from a training's rows, and what is changed of its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anabatic.bench import scaling, training_probe, training_throughput
from anabatic.bench.training_probe import StepWindow, TrainingMeasurement
from anabatic.config.loading import settings
from anabatic.config.pretrain import PretrainJob
from anabatic.config.sections.common import BatchSettings, Data, Optim, Save, Schedule
from anabatic.core.errors import ConfigError, Failure
from anabatic_vessels.config.train import ClassifyPretrainJob, ClassifyTrainJob, VesselData


def job(**given: Any) -> PretrainJob:
    return PretrainJob(tokenizer="t", data=Data(train=["stdlib:"]), **given)


def test_a_window_is_the_steps_since_the_row_before() -> None:
    logged = [(1, 100, 50.0), (4, 400, 150.0), (8, 800, 400.0)]
    rows = [{"step": step, "tokens": tokens, "tokens_per_s": rate} for step, tokens, rate in logged]
    found = list(training_probe._iter_windows(rows, 4))
    assert [(one.tokens_per_step, one.seconds_per_step) for one in found] == [(100, 100 / 150), (100, 0.25)]
    assert len(list(training_probe._iter_windows(rows[:1], 1))) == 1
    with pytest.raises(Failure, match="no token was trained in the steps up to 1"):
        list(training_probe._iter_windows([{**rows[0], "tokens_per_s": 0.0}], 1))


def test_a_job_is_changed_in_nothing_that_a_step_is_made_of(tmp_path: Path) -> None:
    own = job(save=Save(every=5), optim=Optim(on_bad_step="rewind"), schedule=Schedule(max_steps=7))
    made = training_probe.adapt_job(own, tmp_path, 3, 12)
    assert (made.out, made.schedule.max_steps, made.log.every) == (str(tmp_path), 12, 3)
    assert made.save.every == 0 and made.data.valid_fraction == 0.0 and made.optim.on_bad_step == "skip"
    assert (made.model, made.batch, made.parallel, made.device) == (own.model, own.batch, own.parallel, own.device)
    assert training_probe.adapt_job(job(), tmp_path, 3, 12).schedule.max_steps == training_probe.DEFAULT_MAX_STEPS
    assert training_probe.adapt_job(job(schedule=Schedule(max_steps=900)), tmp_path, 3, 12).schedule.max_steps == 900
    assert settings.build_job("pretrain", settings.job_to_dict(made), "") == made


@pytest.mark.parametrize("kind", [ClassifyTrainJob, ClassifyPretrainJob])
def test_classifiers_hold_out_vessels_and_are_asked_at_the_end(kind: type, tmp_path: Path) -> None:
    own = kind(data=VesselData(train=["rows.jsonl"], valid_fraction=0.2))
    made = training_probe.adapt_job(own, tmp_path, 3, 12)
    assert made.data == own.data and made.eval == type(own.eval)(every=training_probe.DEFAULT_MAX_STEPS)
    name = "classify train" if kind is ClassifyTrainJob else "classify pretrain"
    assert settings.build_job(name, settings.job_to_dict(made), "") == made


def test_the_training_tells_why_it_ended(tmp_path: Path) -> None:
    said = tmp_path / "training.log"
    said.write_text("step 1\nerror: too small\nhint: make it larger\n")
    error = training_probe._build_training_error(2, said)
    assert isinstance(error, ConfigError) and (str(error), error.hint) == ("too small", "make it larger")
    said.write_text("Killed\n")
    assert "exit code 137: Killed" in str(training_probe._build_training_error(137, said))
    said.write_text("")
    assert "it said nothing" in str(training_probe._build_training_error(1, said))


def trained(speed: float, name: str = "Ascend910B3", world: int = 1) -> TrainingMeasurement:
    row = {"mfu": 0.2, "memory_bytes": 10, "data_wait": None}
    rows = [StepWindow(1000 / speed / factor, 1000, row) for factor in (9.0, 1.0, 1.1, 0.9)]
    sizes = {"global_batch_tokens": 1024 * world, "micro_batch_tokens": 1024}
    return TrainingMeasurement(rows, 2.5, {"name": name, "world_size": world}, sizes)


def test_figures_leave_the_warm_up_out_and_stand_beside_the_plan() -> None:
    found = trained(500.0)
    own = job(batch=BatchSettings(seq_len=1024))
    paper, told = training_throughput.plan_measured_job("pretrain", own, found)
    assert paper is not None and not told and paper.choice.step_time.tokens == 1024
    tokens, step, mfu, memory, start = training_throughput.build_training_metrics(found, 1, paper)
    assert (
        tokens.median == pytest.approx(500.0)
        and len(tokens.values) == 3
        and tokens.planned_value == paper.choice.tokens_per_s
    )
    assert step.planned_value == paper.choice.step_time.total_seconds and mfu.values == (0.2, 0.2, 0.2)
    assert memory.planned_value == paper.choice.memory.total and start.values == (2.5,)
    assert training_throughput.plan_measured_job("pretrain", own, trained(1.0, "some processor")) == (None, [])
    assert training_throughput.plan_measured_job("rl", own, found) == (None, [])


def test_speed_up_and_efficiency_are_against_the_least_number() -> None:
    found = {2: trained(400.0, world=2), 8: trained(1200.0, world=8)}
    made = {one.name: one for one in scaling._build_scaling_metrics(8, 2, found, 1, "pretrain", job())}
    assert made["speed-up"].values == (pytest.approx(3.0),) and made["efficiency"].values == (pytest.approx(0.75),)
    speeds = {
        count: training_throughput.plan_measured_job("pretrain", job(), one)[0].choice.tokens_per_s
        for count, one in found.items()
    }
    assert made["speed-up"].planned_value == pytest.approx(speeds[8] / speeds[2])


@pytest.mark.parametrize(("weak", "tokens"), [(False, 2048), (True, 8192)])
def test_all_numbers_of_devices_take_the_first_ones_sizes(weak: bool, tokens: int) -> None:
    found = {1: TrainingMeasurement([], 1.0, {}, {"global_batch_tokens": 2048, "micro_batch_tokens": 1024})}
    assert scaling._job_for_devices(job(), 1, weak, {}).batch == job().batch
    made = scaling._job_for_devices(job(), 4, weak, found)
    assert (made.batch.global_batch_tokens, made.device.nproc) == (tokens, 4)
