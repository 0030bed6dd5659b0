"""What is done when memory runs out, and what two rehearsed steps leave behind: nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabatic.config.rl import RlJob
from anabatic.config.sections.common import BatchSettings, Data
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sft import SftJob
from anabatic.core import relaunch
from anabatic.core.errors import CheckpointError, Failure, RestartRequested
from anabatic.device.device import Device, select_device
from anabatic.parallel.world import World
from anabatic.plan.training_setup import Layout
from anabatic.train import sizing
from anabatic.train.auto import micro_batch_probe
from anabatic.train.auto import state as auto_state
from anabatic.train.auto.out_of_memory import handle_out_of_memory
from anabatic.train.auto.state import AutoState
from anabatic.train.checkpoint.run_state import TrainProgress
from anabatic.train.sizing import StepSizes
from anabatic_testing.tiny_models import build_tiny_model
from anabatic_vessels.config.train import ClassifyTrainJob, VesselData
from unit.train.test_step import batch_of, step_of

FULL = torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)")
SIZES = StepSizes(micro_batch_tokens=512, micro_steps=2, steps=10, lr=1e-4, matrix_lr=0.0)
WAYS = st.builds(
    Layout,
    st.sampled_from(["ddp", "zero3"]),
    st.booleans(),
    st.sampled_from(["none", "full"]),
    *[st.integers(1, 64)] * 6,
)
STATES = st.builds(
    AutoState,
    st.integers(0, 9),
    st.text(),
    st.none() | WAYS,
    st.none() | st.integers(1, 10**6),
    st.none() | st.integers(1, 10**9),
    st.none() | st.integers(1, 10**6),
    st.lists(WAYS).map(tuple),
)


def job_of(out: Path, **more: Any) -> SftJob:
    return SftJob(model="m", out=str(out), data=Data(train=["x"]), batch=BatchSettings(seq_len=128), **more)


@pytest.fixture
def device() -> Device:
    return select_device(DeviceConfig(type="cpu", threads=1))


def fail(job: Any, device: Device, least: int, sizes: StepSizes | None, error: BaseException = FULL) -> Failure:
    with pytest.raises(Failure) as caught, handle_out_of_memory(job, device, World(), least, sizes):
        raise error
    return caught.value


@given(STATES)
def test_what_was_settled_is_read_as_it_was_written(state: AutoState) -> None:
    assert AutoState.from_json(state.to_json()) == state
    assert AutoState.from_json("") == AutoState()


SETTLED = {"lowered": 0, "place": "", "way": None, "micro": None, "batch": None, "most": None, "refused": []}
BROKEN = (
    {"way": 1}, {"x": 1}, {"way": ["zero3"]}, {"way": ["zero9", False, "none"]}, {"way": ["zero3", 0, "none"]},
    {"way": ["zero3", False, "none", 1, 2]}, {"way": ["zero3", False, "none", 1, 1, 1, 1, 1, 0]}, {"refused": [[1]]},
    {"micro": "512"}, {"batch": -1}, {"lowered": None},
)  # fmt: skip


def test_a_file_of_an_older_start_has_no_mesh() -> None:
    state = AutoState.from_json(json.dumps({**SETTLED, "way": ["zero3", True, "full"], "micro": 512}))
    assert state.way is None and state.micro == 512


@pytest.mark.parametrize("text", ["{", "[]", "{}", *(json.dumps({**SETTLED, **wrong}) for wrong in BROKEN)])
def test_a_broken_file_is_told(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"auto\.json cannot be read"):
        AutoState.from_json(text)


def test_without_auto_the_error_names_the_way_out(tmp_path: Path, device: Device) -> None:
    error = fail(job_of(tmp_path), device, 128, SIZES)
    told = "NPU out of memory. Tried to allocate 2.00 GiB, at micro-batches of 512 tokens x 2, 1,024 a step"
    assert str(error) == told
    for part in ("--auto", "anabatic plan", "--batch.micro-batch-tokens 256"):
        assert part in error.hint
    assert error.exit_code == 1 and not (tmp_path / auto_state.AUTO_FILE).exists()
    classify = ClassifyTrainJob(data=VesselData(train=["x"]), out=str(tmp_path))
    assert "--auto" not in fail(classify, device, 128, SIZES).hint


def test_reinforcement_learning_counts_answers(tmp_path: Path, device: Device) -> None:
    job = RlJob(model="m", out=str(tmp_path), data=Data(train=["x"]), device_batch_size=4)
    assert fail(job, device, 128, None).hint.startswith("lower device_batch_size, now 4")


def test_with_auto_the_next_start_takes_half_at_the_same_global_batch(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reports").mkdir()
    monkeypatch.setenv(relaunch.REPORTS_VARIABLE, str(tmp_path / "reports"))
    job = job_of(tmp_path, auto=True)
    before = AutoState(place="1 x x", way=Layout("single", False, "none"))
    (tmp_path / auto_state.AUTO_FILE).write_text(before.to_json())
    error = fail(job, device, 128, SIZES)
    assert isinstance(error, RestartRequested) and error.exit_code == relaunch.EXIT_RESTART
    assert "now 256 tokens x 4, 1,024 a step as before" in str(error)
    assert (tmp_path / "reports" / relaunch.RESTART_FILE).read_text() == str(error)
    state = auto_state.load_state(job, World())
    assert state == replace(before, lowered=1, micro=256, batch=1024, most=256)
    batch = auto_state.get_resolved_batch(job, state)
    assert batch is not None and (batch.micro_batch_tokens, batch.global_batch_tokens) == (256, 1024)


def test_below_a_segment_the_way_is_given_up(tmp_path: Path, device: Device) -> None:
    job = job_of(tmp_path, auto=True)
    way = Layout("ddp", False, "none")
    (tmp_path / auto_state.AUTO_FILE).write_text(AutoState(way=way, batch=1024, micro=512, most=512).to_json())
    assert "ddp, recompute none is not tried again" in str(fail(job, device, 512, SIZES))
    assert auto_state.load_state(job, World()) == AutoState(lowered=1, batch=1024, refused=(way,))
    assert not isinstance(fail(job, device, 512, None), RestartRequested)  # there is no way left that was chosen


def test_other_errors_pass(tmp_path: Path, device: Device) -> None:
    with (
        pytest.raises(RuntimeError, match="shapes"),
        handle_out_of_memory(job_of(tmp_path), device, World(), 1, SIZES),
    ):
        raise RuntimeError("shapes do not fit")
    told = RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you")
    assert "--auto" in fail(job_of(tmp_path), device, 128, SIZES, told).hint
    assert fail(job_of(tmp_path), device, 128, None, MemoryError()).hint.startswith("--auto")


@pytest.mark.parametrize(
    ("before", "now", "ranks", "expected"), [(512, 256, 2, 20), (256, 512, 1, 5), (512, 512, 1, 10)]
)
def test_the_place_in_the_data_is_counted_anew(before: int, now: int, ranks: int, expected: int) -> None:
    progress = TrainProgress(step=5, loader={"micro_batch": 10, "cursors": []})
    auto_state.rescale_loader_position(progress, before, now, ranks)
    assert progress.loader == {"micro_batch": expected, "cursors": []}


def test_all_ranks_take_the_start_that_was_lowered_most() -> None:
    once, twice = (
        AutoState(lowered=1, micro=256),
        AutoState(lowered=2, way=None, refused=(Layout("ddp", False, "none"),)),
    )
    texts = ["", once.to_json(), twice.to_json()]
    assert auto_state.select_latest_state(texts) == auto_state.select_latest_state(reversed(texts)) == twice


def test_rehearsed_steps_change_nothing() -> None:
    first, second = build_tiny_model(), build_tiny_model()
    batches = [batch_of(32, 20, seed) for seed in range(4)]
    plain, rehearsed = (step_of(model, name="adamw", spike=6.0) for model in (first, second))
    rehearsed.probe_step(iter(batches[2:]), 2)
    rehearsed.probe_step(iter(batches), 1)
    for step in (plain, rehearsed):
        step.run_step(iter(batches), 2, 1.0)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert vars(plain.read_stats()) | {"data_wait_s": 0} == vars(rehearsed.read_stats()) | {"data_wait_s": 0}
    assert torch.equal(plain.spike_detector.window, rehearsed.spike_detector.window)
    assert plain.optimizer.step_number == rehearsed.optimizer.step_number == 1


def test_a_larger_micro_batch_is_tried_where_there_is_room(tmp_path: Path, device: Device) -> None:
    job = job_of(tmp_path, auto=True)
    model = build_tiny_model()
    setup = sizing.build_model_setup(job, model, device, World())
    assert setup is not None and (setup.seq_len, setup.shape.layers) == (128, model.config.num_hidden_layers)
    seen: list[int] = []

    class Endless:
        def __init__(self, tokens: int) -> None:
            seen.append(tokens)
            self.tokens = tokens

        def __enter__(self) -> Endless:
            return self

        def __exit__(self, *error: object) -> None: ...

        def __next__(self) -> Any:
            return batch_of(self.tokens, self.tokens, 1)

    sizes = StepSizes(128, 4, 10, 1e-4, 0.0)
    found = micro_batch_probe.choose_micro_batch(
        job, AutoState(most=256), setup, sizes, step_of(model), Endless, device, World()
    )
    assert seen == [128, 256]  # 512 would be more than is known to fit
    assert found.micro_batch_tokens * found.micro_steps == 512
    fixed = replace(job, batch=replace(job.batch, micro_batch_tokens=128))
    seen.clear()
    assert (
        micro_batch_probe.choose_micro_batch(fixed, AutoState(), setup, sizes, step_of(model), Endless, device, World())
        == sizes
    )
    assert seen == [128]
