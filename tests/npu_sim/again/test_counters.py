"""What the counters of the simulated NPU say of our own training."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from e2e.home import Home, Options

MORE: Options = {"log.every": 10, "save.every": 0, "eval.every": 0, "schedule.max-steps": 22, "device.dtype": "bf16"}
"""22 steps that log at 1, 10, 20 and 22."""


@pytest.fixture(scope="module", params=["pretrain", "dpo"])
def steps(home: Home, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The counters of each step of a training."""
    report = home.root / f"{request.param}.json"
    program = (sys.executable, "-m", "anabatic", "sim", "--report", str(report), "--")
    counted = replace(home, program=program)
    if request.param == "pretrain":
        words = counted.pretrain(home.root / "counted", more=MORE)
    else:
        base = request.getfixturevalue("base")
        rows = [{"prompt": "the wind?", "chosen": "up", "rejected": "down"}] * 64  # alike, so that batches are
        pairs = home.root / "alike.jsonl"
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = counted.dpo(home.root / "counted-dpo", base, pairs, more={**MORE, "tuner": "lora"})
    counted.anabatic(*words)
    found: list[dict[str, Any]] = json.loads(Path(report).read_text())["steps"]
    return found


def test_the_host_waits_only_where_the_loop_logs(steps: list[dict[str, Any]]) -> None:
    waited = [number for number, step in enumerate(steps, start=1) if step["syncs"]]
    # What is read behind step 10 is counted at the beginning of step 11.
    assert len(steps) == 22 and set(waited) <= {1, 2, 11, 21}


def test_every_step_launches_the_same_operators(steps: list[dict[str, Any]]) -> None:
    launched = [step["operators"] for number, step in enumerate(steps, start=1) if number not in (1, 2, 11, 21)]
    assert len(set(launched)) == 1
