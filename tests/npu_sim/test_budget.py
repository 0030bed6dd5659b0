"""What a step of each job may cost on simulated NPUs: benchmarks/npu_budget.json."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from npu_sim.conftest import Sim

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("npu_budget")


@pytest.fixture
def budget(program: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(program.BUDGET.read_text(encoding="utf-8"))
    return read


def test_no_job_costs_more_than_its_budget(sim: Sim, program: Any, budget: dict[str, Any]) -> None:
    names = [name for name, job in program.JOBS.items() if not job.is_peer]
    done = sim.command("python", str(BENCHMARKS / "npu_jobs.py"), str(sim.folder), *names, flags=["--npus", "2"])
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: program.counts(sim.folder, name) for name in names}
    assert program.compare(found, budget) == []


def test_the_goals_hold_in_the_budget(program: Any, budget: dict[str, Any]) -> None:
    jobs = budget["jobs"]
    assert set(jobs) == set(program.JOBS)
    for ours, peer in program.PEERS.items():
        assert jobs[ours]["operators"] <= 0.4 * jobs[peer]["operators"]
        assert jobs[ours]["waits"] == 0 < jobs[peer]["waits"]
    assert jobs["full"]["peak_bytes"] <= 0.65 * jobs["Trainer, full"]["peak_bytes"]
    assert jobs["decode"]["by_operator"] == {"aclmdlRIExecuteAsync": 1, "aten::copy_": 2}
    assert all(row["waits"] == 0 for name, row in jobs.items() if name != "decode" and not program.JOBS[name].is_peer)
    assert jobs["lora"]["peak_bytes"] <= 0.6 * jobs["Trainer + PEFT, lora"]["peak_bytes"]
    for name, job in program.JOBS.items():
        floor = program.least(name)
        if floor is not None:
            calls = sum(row["calls"] for row in jobs[name]["collectives"].values())
            sent = program.sent_bytes(jobs[name]["collectives"], job.ranks)
            assert calls == floor[0] and sent == pytest.approx(floor[1], rel=1e-3), name


def test_what_is_more_is_named(program: Any, budget: dict[str, Any]) -> None:
    found = {"full, ddp": copy.deepcopy(budget["jobs"]["full, ddp"])}
    assert program.compare(found, budget) == []
    now = found["full, ddp"]
    now["operators"] += 100
    now["by_operator"]["aten::mm"] += 100
    now["waits"], now["lines"] = 1, ["step.py:7: aclrtMemcpy"]
    now["peak_bytes"] *= 2
    now["collectives"]["all_reduce"]["calls"] += 1
    said = program.compare(found, {**budget, "versions": program.versions()})
    more = now["by_operator"]["aten::mm"]
    assert f"  aten::mm {more - 100} -> {more} (+100)" in said and "  step.py:7: aclrtMemcpy" in said
    assert sum(line.startswith("full, ddp: ") for line in said) == 4 and program.COMMAND in said[-1]


def test_a_budget_that_holds_nothing_any_more_is_named(program: Any, budget: dict[str, Any]) -> None:
    found = {"lora": copy.deepcopy(budget["jobs"]["lora"])}
    found["lora"]["operators"] //= 2
    said = program.compare(found, {**budget, "versions": program.versions()})
    assert said[0].startswith("lora: ") and "budget" in said[0]
