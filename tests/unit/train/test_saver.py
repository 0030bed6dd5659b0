"""Checkpoints that are written while the training continues: what was at the time, whole, one after the other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.common import Save
from anabatic.core.errors import CheckpointError, Failure
from anabatic.core.paths import RunFolder
from anabatic.device.device import select_device
from anabatic.parallel.world import World
from anabatic.train.checkpoint import manifest, storage
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic.train.checkpoint.saver import SMALL_CHECKPOINT_BYTES, CheckpointSaver

DEVICE = select_device(DeviceConfig(type="cpu", threads=1))


def at_step(step: int) -> RunState:
    return RunState(TrainProgress(step=step))


def saver_of(folder: RunFolder, **settings: object) -> CheckpointSaver:
    return CheckpointSaver(folder, Save(background="on", **settings), DEVICE, World())  # type: ignore[arg-type]


def read(folder: RunFolder, size: int = 5) -> tuple[int, torch.Tensor]:
    found = storage.find_newest_checkpoint(folder, World())
    assert found is not None
    tensors = {"model.a": torch.zeros(size)}
    storage.load_checkpoint(found, tensors, DEVICE, World())
    return found.state.progress.step, tensors["model.a"]


def test_what_is_written_is_what_was_when_it_was_asked_for(tmp_path: Path) -> None:
    folder, value, host = RunFolder(tmp_path), torch.zeros(5), at_step(1)
    expected = torch.get_rng_state()
    with saver_of(folder) as saver:
        saver.save(1, {"model.a": value}, host)
        value += 7.0  # the next step
        host.progress.step = 99
        torch.rand(10)
    assert saver.take_finished()[0].is_background and saver.take_finished() == []
    step, found = read(folder)
    assert step == 1 and torch.equal(found, torch.zeros(5))
    assert torch.equal(torch.get_rng_state(), expected)


def test_the_next_one_waits_and_both_are_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with saver_of(folder, keep_last=1) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"model.a": torch.full((5,), float(step))}, at_step(step))
    assert [saved.step for saved in saver.take_finished()] == [1, 2, 3]
    assert [step for step, _ in manifest.list_checkpoint_folders(tmp_path)] == [3]
    step, found = read(folder)
    assert step == 3 and torch.equal(found, torch.full((5,), 3.0))


def test_the_checkpoint_of_the_best_evaluation_is_kept(tmp_path: Path) -> None:
    with saver_of(RunFolder(tmp_path), keep_last=1, keep_best=True) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"model.a": torch.zeros(5)}, at_step(step), best=1)
    assert [step for step, _ in manifest.list_checkpoint_folders(tmp_path)] == [1, 3]


@pytest.mark.parametrize("ask", ["done", "wait", "save"])
def test_a_thread_that_cannot_write_fails_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    folder = RunFolder(tmp_path)
    saver = saver_of(folder)
    saver.save(1, {"model.a": torch.zeros(5)}, at_step(1))
    saver.wait()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    saver.save(2, {"model.a": torch.ones(5)}, at_step(2))
    thread = saver._thread
    assert thread is not None
    thread.join()
    calls = {
        "done": saver.take_finished,
        "wait": saver.wait,
        "save": lambda: saver.save(3, {"model.a": torch.ones(5)}, at_step(3)),
    }
    with pytest.raises(Failure, match="no space left while writing .*checkpoint-2"):
        calls[ask]()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"] and read(folder)[0] == 1


def test_a_training_that_fails_lets_the_thread_finish(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(Failure, match="the training"), saver_of(folder) as saver:
        saver.save(1, {"model.a": torch.zeros(5)}, at_step(1))
        raise Failure("the training")
    assert read(folder)[0] == 1


def test_auto_takes_the_background_for_what_is_large(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="anabatic")
    for number, said in (
        (SMALL_CHECKPOINT_BYTES // 4 - 1, "while the training waits (auto: "),
        (SMALL_CHECKPOINT_BYTES // 4, "in the background (auto: "),
    ):
        with CheckpointSaver(RunFolder(tmp_path), Save(), DEVICE, World()) as saver:
            saver.save(number, {"model.a": torch.empty(number)}, at_step(number))
        assert f"checkpoints are written {said}64.0 MiB" in caplog.text


def test_a_copy_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabatic.train.checkpoint.saver.get_free_host_memory", lambda: 100)
    saver = saver_of(RunFolder(tmp_path))
    with pytest.raises(CheckpointError, match=r"a copy of 400 B is too much for 100 B of free host memory"):
        saver.save(1, {"model.a": torch.zeros(100)}, at_step(1))
    assert not list(tmp_path.iterdir())
