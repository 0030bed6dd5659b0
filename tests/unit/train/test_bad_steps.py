"""Bad steps: named with their rows, skipped, gone back before, or the end; the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core import json_reader
from anabatic.core.errors import DataError, Failure
from anabatic.data.shards.reader import ShardSet
from anabatic.device.device import select_device
from anabatic.parallel.collectives import all_reduce_sum, barrier
from anabatic.parallel.world import init_world, leave_world
from anabatic.train.checkpoint import manifest
from anabatic.train.guards.spike_detector import WINDOW_STEPS, SpikeDetector
from anabatic.train.loop import fit
from anabatic_testing.multiprocess import spawn_ranks
from unit.train.fitting import conversations, fitting


def lines(path: Path) -> list[dict[str, Any]]:
    return list(json_reader.read_json_lines(path))


def steps_with(folder: Path, row: int, name: str = "rows-rank-0.jsonl") -> list[tuple[int, bool]]:
    """Step and whether it was skipped, of each time a row was read."""
    return [
        (line["step"], line.get("dropped", False))
        for line in lines(folder / name)
        if any(one[1] == row for one in line["rows"])
    ]


def test_a_skipped_step_is_named_with_its_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    with fitting(run, conversations(tmp_path / "data", bad=(33, 70))) as (job, progress):
        assert fit(job, progress) and progress.step == 20
    found = lines(run / "bad_steps.jsonl")
    bad = [(steps_with(run, row)[0][0], row) for row in (33, 70)]
    assert progress.skipped == len(found) == len({step for step, _ in bad})
    for line in found:
        rows = {row["row"] for row in line["ranks"][0]["rows"]}
        assert line["reason"] == "not finite" and line["loss"] is None and line["action"] == "skip"
        assert rows >= {row for step, row in bad if step == line["step"]}
        assert line["ranks"][0]["rows"][0].keys() == {"source", "row", "pass", "start", "tokens"}
        assert f"step {line['step']}: loss or gradient is not finite" in caplog.text
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(1, 21))


def test_stop_ends_the_run_and_says_where_to_look(tmp_path: Path) -> None:
    data = conversations(tmp_path / "data", bad=(33,))
    expected = pytest.raises(DataError, match=r"step \d+: loss or gradient is not finite")
    with fitting(tmp_path / "run", data, on_bad_step="stop") as (job, progress), expected as caught:
        fit(job, progress)
    (found,) = lines(tmp_path / "run" / "bad_steps.jsonl")
    assert 33 in {row["row"] for row in found["ranks"][0]["rows"]} and "bad_steps.jsonl" in caught.value.hint


def test_rewind_passes_over_the_rows_and_every_other_is_read_once(tmp_path: Path) -> None:
    """The bad row's step is skipped once, and its number goes to the data behind it."""
    run = tmp_path / "run"
    data = conversations(tmp_path / "data", bad=(33,))
    with fitting(run, data, steps=28, on_bad_step="rewind") as (job, progress):
        assert fit(job, progress)
    (found,) = lines(run / "bad_steps.jsonl")
    assert (progress.step, progress.skipped, progress.rewinds) == (28, 0, 1)
    assert steps_with(run, 33) == [(found["step"], True)]
    read = [row[1] for line in lines(run / "rows-rank-0.jsonl") for row in line["rows"] if row[2] == 0]
    assert len(read) == len(set(read)) and len(read) > 110
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 29)) and all(line["loss"] for line in metrics)
    assert [line["event"] for line in lines(run / "events.jsonl")].count("rewind") == 1


def poisoned(at: int, again: int = 1) -> Callable[[int, Any], None]:
    """Return an evaluation that destroys a weight after a step, as a faulty chip might."""
    left = [again]

    def evaluate(step: int, model: Any) -> None:
        if step == at and left[0]:
            left[0] -= 1
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight[3, 5] = float("nan")

    return evaluate


def test_destroyed_weights_are_mended_by_going_back(tmp_path: Path) -> None:
    """No refused update would; one step's data are skipped to get on."""
    data = conversations(tmp_path / "data")
    with fitting(tmp_path / "run", data, on_bad_step="rewind", evaluate=poisoned(12)) as (job, progress):
        assert fit(job, progress)
    assert (progress.step, progress.rewinds, progress.rewound_to, len(progress.dropped)) == (20, 1, 10, 1)
    broken = [name for name, tensor in job.checkpoint_tensors().items() if not bool(torch.isfinite(tensor).all())]
    assert broken == ["model.model.embed_tokens.weight"]  # the bad token's row, which no conversation has
    assert [line["step"] for line in lines(tmp_path / "run" / "bad_steps.jsonl")] == [13]


def test_a_checkpoint_that_is_itself_destroyed_is_gone_back_behind(tmp_path: Path) -> None:
    """The weights break between the last look and the save: nothing is known of it yet."""
    data, destroy = conversations(tmp_path / "data"), poisoned(10)
    with fitting(tmp_path / "run", data, on_bad_step="rewind") as (job, progress):

        def describe(state: dict[str, Any]) -> dict[str, Any]:
            destroy(progress.step, job.train_step.root.model)
            return {}

        job.describe_loader = describe
        assert fit(job, progress)
    assert (progress.step, progress.rewinds, progress.rewound_to, len(progress.dropped)) == (20, 2, 5, 2)


def test_too_many_rewinds_are_the_end(tmp_path: Path) -> None:
    data = conversations(tmp_path / "data")
    run = fitting(tmp_path / "run", data, evaluate=poisoned(12, again=9), on_bad_step="rewind", max_rewinds=2)
    expected = pytest.raises(Failure, match=r"step 13: .*after 2 rewinds \(optim.max_rewinds\)")
    with run as (job, progress), expected:
        fit(job, progress)


def test_nothing_to_go_back_to_is_said(tmp_path: Path) -> None:
    data = conversations(tmp_path / "data")
    run = fitting(tmp_path / "run", data, on_bad_step="rewind", evaluate=poisoned(2))
    with run as (job, progress), pytest.raises(Failure, match="step 3: .*no earlier checkpoint"):
        fit(job, progress)


def two_ranks(root: Path) -> None:
    """A row that only one rank reads: both go back, and both leave it out; threads of both write the checkpoints."""
    world = init_world(select_device(DeviceConfig(type="cpu", threads=1)))
    if world.is_main_process:
        conversations(root / "data", bad=(33,))
    barrier(world)
    with fitting(root / "run", ShardSet.open(root / "data"), world, on_bad_step="rewind") as (job, progress):
        assert fit(job, progress)
    assert (progress.step, progress.rewinds) == (20, 1)
    total = all_reduce_sum(job.train_step.optimizer.params["model.norm.weight"].sum().detach().clone(), world)
    assert float(total) == float(2 * job.train_step.optimizer.params["model.norm.weight"].sum())
    leave_world(world)


@pytest.mark.process
def test_all_ranks_do_the_same(tmp_path: Path) -> None:
    spawn_ranks(two_ranks, 2, tmp_path)
    (found,) = lines(tmp_path / "run" / "bad_steps.jsonl")
    guilty = [rank["rank"] for rank in found["ranks"] if not rank["finite"]]
    assert len(found["ranks"]) == 2 and len(guilty) == 1
    where = [steps_with(tmp_path / "run", 33, f"rows-rank-{rank}.jsonl") for rank in (0, 1)]
    assert where[guilty[0]] == [(found["step"], True)] and where[1 - guilty[0]] == []
    sealed = manifest.read_manifest(tmp_path / "run" / "checkpoint-20")
    assert {"rng-0.safetensors", "rng-1.safetensors"} <= set(sealed["files"]) and sealed["strategy"] == "ddp"
    assert not manifest.find_first_fault(tmp_path / "run" / "checkpoint-20")


def reference(history: list[float], value: float, factor: float) -> bool:
    """The rule in plain Python: median and median absolute deviation of the last steps."""
    window = sorted(history[-WINDOW_STEPS:])
    middle = window[len(window) // 2]
    away = sorted(abs(one - middle) for one in window)[len(window) // 2]
    return value > middle + factor * max(1.4826 * away, 0.01 * abs(middle))


def test_spikes_are_those_of_the_slow_rule() -> None:
    draw = torch.Generator().manual_seed(3)
    verdicts = SpikeDetector(6.0, torch.device("cpu"))
    losses: list[float] = []
    expected = []
    for number in range(1, 4 * WINDOW_STEPS):
        loss = 3.0 - number / 200 + 0.05 * float(torch.randn((), generator=draw)) + (2.0 if number % 50 == 0 else 0.0)
        loss = float(torch.tensor(loss))
        if len(losses) >= WINDOW_STEPS and reference(losses, loss, 6.0):
            expected.append(number)
        _, ok = verdicts.judge_step(number, torch.tensor(loss), torch.tensor(1.0), False, torch.tensor(True))
        verdicts.record_step(number, [], {})
        assert bool(ok) == (number not in expected)
        losses.append(loss)
    assert [step.step for step in verdicts.take_bad_steps()] == expected and len(expected) >= 3
    assert verdicts.take_bad_steps() == []


def test_a_new_level_is_accepted_in_time_and_a_checkpoint_keeps_the_window() -> None:
    verdicts = SpikeDetector(6.0, torch.device("cpu"))
    refused = 0
    for number in range(1, 3 * WINDOW_STEPS):
        level = 2.0 if number < 2 * WINDOW_STEPS else 5.0
        _, ok = verdicts.judge_step(number, torch.tensor(level), torch.tensor(1.0), False, torch.tensor(True))
        refused += int(not ok)
    assert 0 < refused <= WINDOW_STEPS // 2 + 1
    assert (
        verdicts.state_dict()["window"] is verdicts.window
        and SpikeDetector(0.0, torch.device("cpu")).state_dict() == {}
    )


def test_an_overflow_under_loss_scaling_is_not_told() -> None:
    verdicts = SpikeDetector(0.0, torch.device("cpu"))
    for number, (loss, norm) in enumerate(((1.0, float("inf")), (float("nan"), 1.0)), 1):
        finite, ok = verdicts.judge_step(number, torch.tensor(loss), torch.tensor(norm), True, torch.tensor(True))
        verdicts.record_step(number, [], {})
        assert not finite and not ok
    assert [step.step for step in verdicts.take_bad_steps()] == [2]
