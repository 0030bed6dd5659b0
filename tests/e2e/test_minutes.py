"""`--minutes`: a run takes a given time, decays to its end, and continues with the time that is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from anabatic.core import json_reader
from e2e import command
from e2e.home import Home

SECONDS = 9.0
TIMED = {
    "schedule.minutes": SECONDS / 60,
    "schedule.max-steps": 10**6,
    "schedule.decay-ratio": 0.5,
    "eval.every": 0,
    "log.every": 5,
}


def rates(folder: Path) -> dict[int, float]:
    """Step -> learning rate."""
    return {row["step"]: row["lr"] for row in json_reader.read_json_lines(folder / "metrics.jsonl") if "lr" in row}


def check(folder: Path) -> int:
    """The run came to its end by its own count, with the last learning rate; return its steps."""
    summary, lr = command.summary(folder), rates(folder)
    steps = summary["steps"]
    assert summary["finished"] is True and summary["stopped_early"] is False and max(lr) == steps
    assert lr[steps] == pytest.approx(0.02 * max(lr.values()), rel=1e-6)
    assert {1, 2, 4, 8, 16} <= set(lr) or steps < 16
    assert 0.5 * SECONDS < summary["seconds"] < 3 * SECONDS
    return int(steps)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_takes_the_time(home: Home, tmp_path: Path, processes: int) -> None:
    out = tmp_path / "run"
    result = home.anabatic(*home.pretrain(out, processes, more=TIMED))
    steps = check(out)
    assert f"step {steps}/{steps}" in result.err and "of training" in result.err
    assert "horizon" in command.events(out)
    if processes == 2:  # both ranks did the same steps, or one would have waited for the other for good
        assert command.checkpoints(out)[-1] == steps


def test_a_run_that_was_stopped_uses_the_time_that_is_left(home: Home, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = home.start(*home.pretrain(out, more=TIMED))
    command.interrupt(process, out, 12, signal.SIGTERM, 143)
    before = command.checkpoints(out)[-1]
    again = home.anabatic(*home.pretrain(out, more=TIMED))
    assert f"step {before}" in again.err and check(out) > before


def test_max_steps_ends_it_earlier(home: Home, tmp_path: Path) -> None:
    home.anabatic(*home.pretrain(tmp_path / "run", more={**TIMED, "schedule.max-steps": 11}))
    assert max(rates(tmp_path / "run")) == 11 and command.summary(tmp_path / "run")["finished"]


def test_fine_tuning_takes_the_time_too(home: Home, base: Path, tmp_path: Path) -> None:
    home.anabatic(*home.sft(tmp_path / "run", base, more=TIMED))
    assert command.summary(tmp_path / "run")["seconds"] < 3 * SECONDS


def test_the_depth_follows_and_stays(home: Home, tmp_path: Path) -> None:
    out, more = tmp_path / "run", {**TIMED, "model.width": 32, "schedule.tokens-per-param": 20}
    words = home.pretrain(out, more=more)
    at = words.index("--model.depth")
    del words[at : at + 2]
    process = home.start(*words)
    command.interrupt(process, out, 12, signal.SIGTERM, 143)
    home.anabatic(*words)
    found = json_reader.loads((out / "final_model" / "config.json").read_text(encoding="utf-8"))
    chosen = found["num_hidden_layers"]
    log = (out / "rank-0.log").read_text(encoding="utf-8")
    assert log.count(f"model.depth {chosen}: about 20 tokens for each parameter in 0.15 minutes") == 1
    check(out)
    home.anabatic("checkpoint", "export", out, "--out", tmp_path / "exported")
    exported = json_reader.loads((tmp_path / "exported" / "config.json").read_text(encoding="utf-8"))
    assert exported["num_hidden_layers"] == chosen
