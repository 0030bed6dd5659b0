"""`schedule.minutes`: steps that fit into a time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.pipeline import PipelineStage, scale_minutes
from anabatic.config.sections.common import DerivedSizes, Schedule
from anabatic.core.errors import ConfigError
from anabatic.train.sizing import MIN_TIMED_STEPS, resolve_total_steps
from anabatic.train.time_budget import SETTLED_SHARE, TimeBudget


def train(budget: TimeBudget, seconds_at: list[float], every: int, total: int) -> tuple[int, float, list[int]]:
    """Play a run whose steps take `seconds_at` in turn; return its steps, its time and the totals of its rows."""
    step, elapsed, row_start, row_step, totals = 0, 0.0, 0.0, 0, [total]
    while step < totals[-1]:
        elapsed += seconds_at[step % len(seconds_at)]
        step += 1
        if step == totals[-1] or step == 1 or step % every == 0 or budget.is_early_row(step):
            if step < totals[-1]:
                totals.append(budget.count_steps(totals[-1], step, elapsed, step - row_step, elapsed - row_start))
            row_step, row_start = step, elapsed
    return step, elapsed, totals


@pytest.mark.parametrize(("guess", "every"), [(3, 10), (100, 10), (100000, 10), (200, 1), (200, 50)])
def test_steps_of_equal_length_fill_the_time(guess: int, every: int) -> None:
    steps, elapsed, _ = train(TimeBudget(1.0), [0.3], every, guess)
    assert steps == 200 and elapsed == pytest.approx(60.0)


def test_a_slow_first_step_does_not_shorten_the_run() -> None:
    steps, elapsed, totals = train(TimeBudget(1.0), [10.0, *[0.1] * 5000], 10, 50)
    assert totals[1] == 1 + 5  # by the first step alone
    assert steps == 501 and elapsed == pytest.approx(60.0)


def test_a_first_step_that_is_longer_than_the_time_does_not_end_the_run() -> None:
    steps, _, totals = train(TimeBudget(1.0), [59.0, *[0.1] * 5000], 10, 50)
    assert totals[1] == 3 and steps == 11
    assert train(TimeBudget(1.0), [100.0], 10, 50)[0] == 3


def test_the_line_of_the_log_adds_up() -> None:
    budget = TimeBudget(0.3)
    budget.count_steps(628, 1, 1.0, 1, 1.0)
    total = budget.count_steps(18, 2, 1.2, 1, 0.2)
    text = "86 steps fit into 18.0s of training: 2 done in 1.2s, 84 of 0.2 s left"  # 1.2 + 84 x 0.2 = 18
    assert budget.describe(total, 2, 1.2) == budget.describe(total, 2, 1.2, 86) == text
    ends = "schedule.max_steps ends the run earlier, after 12"
    assert budget.describe(total, 2, 1.2, 12) == f"{text}; {ends}"


def test_steps_that_are_longer_than_the_time_are_not_said_to_fit() -> None:
    budget = TimeBudget(0.3)
    assert budget.count_steps(628, 1, 25.0, 1, 25.0) == 3 == budget.count_steps(3, 2, 50.0, 1, 25.0)
    assert budget.describe(3, 2, 50.0) == "3 steps take longer than 18.0s of training: 2 done in 50.0s, 1 of 25 s left"


@pytest.mark.parametrize(
    ("tokens", "max_steps", "steps", "reason"),
    [
        (10.0, None, MIN_TIMED_STEPS, "about"),  # too few to be timed
        (90 * 1024, None, 90, "about"),
        (90 * 1024, 90, 90, "given; fewer if 0.3 minutes are over before"),
        (90 * 1024, 1, 1, "given; fewer if 0.3 minutes are over before"),
        (90 * 1024, 1500, 90, "about; at most schedule.max_steps 1,500"),
    ],
)
def test_time_and_number_of_steps_together(tokens: float, max_steps: int | None, steps: int, reason: str) -> None:
    plan = DerivedSizes()
    schedule = Schedule(minutes=0.3, max_steps=max_steps)
    assert resolve_total_steps(plan, schedule, 4096, tokens, "about", 1024) == steps
    assert plan.reasons["steps"] == reason


def test_a_machine_that_becomes_slower_ends_in_time() -> None:
    _, elapsed, _ = train(TimeBudget(1.0), [*[0.1] * 200, *[0.3] * 5000], 10, 50)
    assert 58 < elapsed < 63


def test_the_number_of_steps_stays_at_the_end() -> None:
    seconds = [random.Random(0).uniform(0.05, 0.15) for _ in range(5000)]
    budget = TimeBudget(1.0)
    steps, elapsed, totals = train(budget, seconds, 10, 50)
    settled = [total for total in totals if total == steps]
    assert len(settled) > (1 - SETTLED_SHARE) * steps / 10
    assert elapsed == pytest.approx(60.0, rel=0.05)


@given(
    st.floats(0.01, 1000.0),
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8),
    st.integers(1, 100),
    st.integers(1, 10**6),
)
def test_the_end_is_never_behind_and_stays_once_it_is_settled(
    minutes: float, seconds: list[float], every: int, guess: int
) -> None:
    budget, step, elapsed, total = TimeBudget(minutes), 0, 0.0, guess
    for row_number in range(60):
        row = sum(seconds[number % len(seconds)] for number in range(step, step + every))
        step, elapsed, before = step + every, elapsed + row, max(total, step + every)
        total = budget.count_steps(before, step, elapsed, every, row)
        assert total >= step
        if row_number > 1 and elapsed >= SETTLED_SHARE * budget.seconds:
            assert total == before


def test_rows_without_steps_change_nothing() -> None:
    assert TimeBudget(1.0).count_steps(7, 3, 1.0, 0, 0.5) == 7


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf"), 525_601.0])
def test_minutes_out_of_range(minutes: float) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.minutes is"):
        Schedule(minutes=minutes)


def stages(**minutes: float | None) -> dict[str, PipelineStage]:
    return {
        name: PipelineStage(
            command="pretrain", job={} if value is None else {"schedule": {"minutes": value, "decay": 1}}
        )
        for name, value in minutes.items()
    }


def test_minutes_of_a_pipeline_are_shared_as_the_recipe_says() -> None:
    found = stages(tokenizer=None, base=1.0, mid=3.0)
    scale_minutes(found, 2.0, "")
    assert "schedule" not in found["tokenizer"].job
    assert found["base"].job["schedule"] == {"minutes": 0.5, "decay": 1}
    assert found["mid"].job["schedule"]["minutes"] == 1.5


@pytest.mark.parametrize("wrong", ["much", True, None, -1, 0, [1]])
def test_minutes_of_a_pipeline_that_times_nothing(wrong: object) -> None:
    found = {"base": PipelineStage(command="pretrain", job={"schedule": {"minutes": wrong}})}
    with pytest.raises(ConfigError, match="no stage of this recipe has schedule.minutes"):
        scale_minutes(found, 2.0, "")
