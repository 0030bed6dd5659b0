"""What large jobs lose: terms counted by hand, a job simulated failure by failure, and published rows."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.cli.app import main
from anabatic.core.errors import ConfigError
from anabatic.device.table import find_chip
from anabatic.plan import cost_model, model_shape, scale_losses, step_time
from anabatic.plan.scale_losses import ScaleAssumptions, estimate_losses, parse_assumptions
from anabatic.plan.training_setup import TrainingSetup

CHIP = find_chip("Ascend910B3")
assert CHIP is not None
RATES = cost_model.get_chip_rates(CHIP)
SHAPE, _ = model_shape.get_named_shape("Qwen/Qwen2.5-7B")
NOTHING = parse_assumptions("ideal")
SFT = ["--", "sft", "--data", "rows.jsonl", "--batch.seq-len", "512", "--model", "Qwen/Qwen2.5-7B"]


def losses_of(devices: int, assumed: ScaleAssumptions, **more: object) -> scale_losses.ScaleLosses:
    setup = TrainingSetup(SHAPE, strategy="zero3", ranks=devices, micro_tokens=8192, **more)  # type: ignore[arg-type]
    return estimate_losses(setup, step_time.estimate_step_time(setup, RATES), RATES, -(-devices // 8), assumed)


def test_nothing_is_lost_without_assumptions() -> None:
    found = losses_of(4096, NOTHING)
    assert found.total_seconds == found.step and not any(found.get_fractions().values())
    assert math.isinf(found.interval) and math.isinf(found.between_failures)


def test_a_slow_machine_slows_all() -> None:
    """Of 512 machines at least one is slow with probability 1 - 0.995^512; then computing takes a tenth more."""
    assumed = replace(NOTHING, slow_machines=0.005, slowdown=0.1)
    found = losses_of(4096, assumed)
    setup = TrainingSetup(SHAPE, strategy="zero3", ranks=4096, micro_tokens=8192)
    time = step_time.estimate_step_time(setup, RATES)
    assert found.stragglers == pytest.approx((1 - 0.995**512) * 0.1 * max(time.compute, time.launches))
    random.seed(0)
    steps = [any(random.random() < 0.005 for _ in range(64)) for _ in range(4000)]
    assert losses_of(512, assumed).stragglers / (0.1 * time.compute) == pytest.approx(sum(steps) / len(steps), abs=0.03)


def test_shared_links_cost_only_between_machines() -> None:
    assumed = replace(NOTHING, contention=0.5)
    assert losses_of(8, assumed).links == 0
    waiting = {"micro_tokens": 512, "seq_len": 512}
    setup = TrainingSetup(SHAPE, strategy="zero3", ranks=512, **waiting)  # type: ignore[arg-type]
    slower = step_time.estimate_step_time(setup, replace(RATES, network=RATES.network / 2))
    time = step_time.estimate_step_time(setup, RATES)
    found = estimate_losses(setup, time, RATES, 64, assumed)
    assert found.links == pytest.approx(slower.total_seconds - time.total_seconds) and found.links > 0


def test_failures_are_those_of_a_job_simulated_one_by_one() -> None:
    """Failures come at random, a job goes back to its last checkpoint and restarts: the mean of 3,000 hours."""
    assumed = replace(NOTHING, failure_hours=4096.0 * 4, restart_minutes=10.0, checkpoint_minutes=20.0)
    found = losses_of(4096, assumed)
    assert found.between_failures == 4 * 3600 and found.interval == 1200
    random.seed(1)
    done, clock = 0.0, 0.0
    while clock < 3000 * 3600:
        until = random.expovariate(1 / found.between_failures)
        done += until // found.interval * found.interval
        clock += until + 600
    expected = (found.step + found.checkpoints) * clock / done - found.step - found.checkpoints
    assert found.failures == pytest.approx(expected, rel=0.15)


def test_the_default_interval_loses_least() -> None:
    """Young's interval against a search: nothing else loses less, within the formula's own first order."""
    assumed = ScaleAssumptions()
    best = losses_of(1024, assumed)
    others = [
        losses_of(1024, replace(assumed, checkpoint_minutes=best.interval / 60 * factor)) for factor in (0.3, 3.0)
    ]
    assert all(other.checkpoints + other.failures >= best.checkpoints + best.failures for other in others)


def test_a_job_that_never_comes_through() -> None:
    found = losses_of(4096, replace(ScaleAssumptions(), failure_hours=100.0))  # a failure every 88 seconds
    assert math.isinf(found.total_seconds) and found.get_fractions()["failures"] == 1.0


def test_checkpoints_are_not_closer_than_a_step_and_the_time_of_writing() -> None:
    found = losses_of(64, replace(ScaleAssumptions(), checkpoint_minutes=1e-320))
    assert found.interval >= found.step and math.isfinite(found.total_seconds)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["ddp", "zero2", "zero3"]),
    st.floats(0, 1), st.floats(0, 2), st.floats(0, 0.9), st.floats(1e4, 1e7), st.floats(0, 60), st.floats(0, 600),
)  # fmt: skip
def test_losses_grow_with_machines_and_assumptions(
    strategy: str, slow: float, slowdown: float, contention: float, hours: float, restart: float, minutes: float
) -> None:
    assumed = ScaleAssumptions(slow, slowdown, contention, hours, restart, minutes)
    setups = [
        TrainingSetup(SHAPE, strategy=strategy, ranks=8 * machines, micro_tokens=2048)  # type: ignore[arg-type]
        for machines in (1, 8, 64)
    ]
    found = [
        estimate_losses(setup, step_time.estimate_step_time(setup, RATES), RATES, setup.ranks // 8, assumed)
        for setup in setups
    ]
    for losses in found:
        parts = (losses.links, losses.stragglers, losses.checkpoints, losses.failures)
        assert all(part >= 0 for part in parts) and losses.total_seconds >= losses.step
        assert 0 <= sum(losses.get_fractions().values()) <= 1 + 1e-9
    assert found[0].get_fractions()["failures"] <= found[2].get_fractions()["failures"] + 1e-9 or minutes == 0
    worse = replace(assumed, restart_minutes=restart + 10)
    again = estimate_losses(setups[2], step_time.estimate_step_time(setups[2], RATES), RATES, 64, worse)
    assert again.total_seconds >= found[2].total_seconds


def test_published_linearity_of_npus() -> None:
    """GPT3-175B on 128 to 7,968 NPUs (MindSpeed-LLM, docs/zh/appendixes.md): within three points, nothing fitted."""
    from anabatic.plan.shapes.decoder_shape import DecoderShape

    shape = DecoderShape(50257, 12288, 96, 96, 96, 128, 32768)
    rates = {}
    for devices in (128, 1024, 4096, 7968):
        setup = TrainingSetup(shape, strategy="zero3", ranks=devices, recompute="full", micro_tokens=4096, seq_len=4096,
                              micro_steps=8)  # fmt: skip
        time = step_time.estimate_step_time(setup, RATES)
        found = estimate_losses(setup, time, RATES, devices // 8, replace(ScaleAssumptions(), failure_hours=0.0))
        rates[devices] = time.tokens / found.total_seconds / devices
    for devices, published in ((1024, 0.979), (4096, 0.934), (7968, 0.938)):
        assert rates[devices] / rates[128] == pytest.approx(published, abs=0.03)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("slowdwn=1", 'Did you mean "slowdown"'),
        ("slowdown", "'slowdown', which is no assumption"),
        ("slowdown=fast", "slowdown is 'fast', no number"),
        ("contention=1.5", "contention=1.5 is out of range"),
        ("contention=1", "contention=1 is out of range"),
        ("slow_machines=-1", "slow_machines=-1 is out of range"),
        ("failure_hours=inf", "failure_hours=inf is out of range"),
        ("restart_minutes=nan", "restart_minutes=nan is out of range"),
    ],
)
def test_assumptions_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_assumptions(text)
    assert why in str(caught.value) and caught.value.hint


def test_assumptions_are_read() -> None:
    found = parse_assumptions("ideal, slowdown=0.2,restart-minutes=30")
    assert (found.slow_machines, found.slowdown, found.restart_minutes) == (0.0, 0.2, 30.0)
    assert parse_assumptions("") == ScaleAssumptions()


def run_plan(words: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *words])
    return int(caught.value.code or 0)


def test_the_table_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(["--scale", "1024", "--json", *SFT]) == 0
    usual = json.loads(capsys.readouterr().out)["rows"][-1]
    assert set(usual["losses"]) == {"links", "stragglers", "checkpoints", "failures"}
    assert all(0 < share < 0.2 for share in usual["losses"].values())
    assert usual["tokens_per_s_with_losses"] < usual["tokens_per_s"]
    assert run_plan(["--scale", "1024", "--json", "--assume", "ideal", *SFT]) == 0
    ideal = json.loads(capsys.readouterr().out)["rows"][-1]
    assert ideal["tokens_per_s_with_losses"] == pytest.approx(ideal["tokens_per_s"])
    assert run_plan(["--scale", "64", "--assume", "failure_hours=0.5", *SFT]) == 0
    assert "failures" in capsys.readouterr().out
    assert run_plan(["--scale", "64", "--json", "--assume", "failure_hours=0.01", *SFT]) == 0  # every 36 s on one
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["speed_up"] for row in rows] == [0.0] * len(rows) and rows[0]["losses"]["failures"] == 1.0
    assert run_plan(["--assume", "ideal", *SFT]) == 2
    assert "--assume goes with --scale" in capsys.readouterr().err
