"""Checkpoints: exact, whole or not there, and honest about damage."""

from __future__ import annotations

import errno
import json
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from anabatic.config.pretrain import PretrainJob
from anabatic.config.sections.common import Data, Save
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core.errors import AnabaticError, CheckpointError, Failure
from anabatic.core.paths import RunFolder
from anabatic.device.device import select_device
from anabatic.parallel.world import World, init_world, leave_world
from anabatic.train import run_folder
from anabatic.train.checkpoint import manifest, storage
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic.train.checkpoint.saver import CheckpointSaver
from anabatic_testing.multiprocess import spawn_ranks

DEVICE = select_device(DeviceConfig(type="cpu", threads=1))


def save(folder: RunFolder, step: int, value: float = 1.0) -> Path:
    tensors = {
        "model.a": torch.full((3, 4), value),
        "optim.b": torch.arange(5.0) * value,
        "step.c": torch.tensor(value),
    }
    saver = CheckpointSaver(folder, Save(keep_last=9, background="off"), DEVICE, World())
    saver.save(step, tensors, RunState(TrainProgress(step=step)))
    return saver.take_finished()[0].path


def empty() -> dict[str, torch.Tensor]:
    return {"model.a": torch.zeros(3, 4), "optim.b": torch.zeros(5), "step.c": torch.zeros(())}


def test_what_was_saved_comes_back_with_the_random_numbers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 7, 2.5)
    expected = torch.rand(4)
    torch.rand(100)
    found = storage.find_newest_checkpoint(folder, World())
    assert found is not None and found.step == 7 and found.state.progress == TrainProgress(step=7)
    tensors = empty()
    storage.load_checkpoint(found, tensors, DEVICE, World())
    assert torch.equal(tensors["model.a"], torch.full((3, 4), 2.5)) and tensors["step.c"] == 2.5
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("victim", ["manifest.json", "state.json", "__0_0.distcp", ".metadata", "rng-0.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, victim: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 1)
    path = save(folder, 2) / victim
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    else:
        path.unlink()
    found = storage.find_newest_checkpoint(folder, World())
    assert found is not None and found.step == 1
    assert "checkpoint-2 is not used" in caplog.text


def test_a_folder_without_manifest_does_not_exist(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoint_path(5).mkdir(parents=True)
    assert storage.find_newest_checkpoint(folder, World()) is None


@pytest.mark.parametrize("content", ["[]", "{}", '{"files": 3}', '{"files": {"a": 1}}', "null", ""])
def test_a_strange_manifest_is_a_fault(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    (tmp_path / "a").write_text("x")
    assert manifest.find_first_fault(tmp_path)


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 10):
        save(folder, step)
    manifest.remove_old_checkpoints(folder, 2, 10)
    assert [step for step, _ in manifest.list_checkpoint_folders(tmp_path)] == [2, 10]


def test_a_broken_checkpoint_of_a_later_step_does_not_push_out_the_one_just_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (5, 10):
        save(folder, step)
    (folder.checkpoint_path(10) / "state.json").unlink()
    save(folder, 7)
    manifest.remove_old_checkpoints(folder, 1, 7)
    found = storage.find_newest_checkpoint(folder, World())
    assert found is not None and found.step == 7 and not folder.checkpoint_path(5).exists()


def test_other_shapes_and_names_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 1)
    found = storage.find_newest_checkpoint(folder, World())
    assert found is not None
    for tensors in ({**empty(), "model.a": torch.zeros(9, 9)}, {**empty(), "model.new": torch.zeros(2)}):
        with pytest.raises(CheckpointError, match="does not fit"):
            storage.load_checkpoint(found, tensors, DEVICE, World())


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(CheckpointError, match="needs .* but 10 B are free") as caught:
        save(folder, 2)
    assert caught.value.hint
    assert [step for step, _ in manifest.list_checkpoint_folders(tmp_path)] == [1] and storage.find_newest_checkpoint(
        folder, World()
    ) is not None


def test_a_disk_that_fills_up_while_saving_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(manifest, "write_file", full)
    with pytest.raises(Failure, match="no space left"):
        save(folder, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
    assert storage.find_newest_checkpoint(folder, World()).step == 1  # type: ignore[union-attr]


def test_saving_again_replaces_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 3, 1.0)
    save(folder, 3, 2.0)
    found = storage.find_newest_checkpoint(folder, World())
    assert found is not None
    tensors = empty()
    storage.load_checkpoint(found, tensors, DEVICE, World())
    assert tensors["step.c"] == 2.0
    stored = json.loads((found.path / "manifest.json").read_text())
    assert set(stored["files"]) == {"__0_0.distcp", ".metadata", "rng-0.safetensors", "state.json"}


def test_errors_are_for_users() -> None:
    assert issubclass(CheckpointError, AnabaticError) and CheckpointError("x").exit_code == 1


def test_two_jobs_in_one_folder_are_refused(tmp_path: Path) -> None:
    job = PretrainJob(out=str(tmp_path / "run"), tokenizer="t", data=Data(train=["stdlib:"]))
    with run_folder.open_run_folder(job, DEVICE, World()) as folder:
        save(folder, 1)
        manifest.temporary_path(folder.checkpoint_path(2)).mkdir()  # being written
        with (
            pytest.raises(Failure, match="another training run works in"),
            run_folder.open_run_folder(job, DEVICE, World()),
        ):
            raise AssertionError("both work in it")
        assert manifest.temporary_path(folder.checkpoint_path(2)).exists()
    with run_folder.open_run_folder(
        job, DEVICE, World()
    ):  # what a killed job has left half-written goes, what is whole stays
        assert [path.name for path in folder.root.glob("*checkpoint*")] == ["checkpoint-1"]


def test_the_manifest_says_what_the_ranks_have_written(tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1)
    files = manifest.read_manifest(path)["files"]
    assert set(files) == {file.name for file in path.iterdir()} - {"manifest.json"}
    for name, entry in files.items():
        content = (path / name).read_bytes()
        assert entry == {"bytes": len(content), "crc32": zlib.crc32(content)}, name


def test_bytes_that_change_on_their_way_to_the_disk_are_found(tmp_path: Path) -> None:
    written: dict[str, manifest.FileEntry] = {}
    with manifest.ChecksumFile(tmp_path / "a", written) as file:
        file.write(b"x" * 5000)
        file.flush()
        with open(tmp_path / "a", "r+b") as disk:
            disk.write(b"y")
    assert written["a"]["bytes"] == 5000 == (tmp_path / "a").stat().st_size
    assert manifest.compute_crc32(tmp_path / "a") != written["a"]["crc32"]


def test_a_file_of_a_rank_that_rank_0_does_not_see_is_no_checkpoint(tmp_path: Path) -> None:
    target = RunFolder(tmp_path).checkpoint_path(1)
    built = manifest.temporary_path(target)
    built.mkdir()
    (built / "__1_0.distcp").write_bytes(b"abc")
    written: dict[str, manifest.FileEntry] = {"__1_0.distcp": {"bytes": 9, "crc32": 0}}
    with pytest.raises(CheckpointError, match=r"__1_0.distcp, which a rank has written, has 3 of 9 bytes") as caught:
        manifest.commit_checkpoint(built, target, 1, "{}", tmp_path / "none", {}, written)
    assert "all machines share" in str(caught.value.hint) and not target.exists()


def save_shards(root: str) -> None:
    world = init_world(DEVICE)
    tensors = {f"model.{number}": torch.full((1000,), float(number)) for number in range(2)}
    content = storage.CheckpointContent(tensors, DEVICE.get_rng_state(), "{}")
    storage.save_checkpoint(RunFolder(root), 3, content, world)
    leave_world(world)


@pytest.mark.process
def test_each_rank_seals_its_own_files(tmp_path: Path) -> None:
    spawn_ranks(save_shards, 2, str(tmp_path))
    path = RunFolder(tmp_path).checkpoint_path(3)
    names = {".metadata", "__0_0.distcp", "__1_0.distcp", "rng-0.safetensors", "rng-1.safetensors", "state.json"}
    assert set(manifest.read_manifest(path)["files"]) == names and not list(manifest.find_faults(path))
    (path / "__1_0.distcp").write_bytes((path / "__1_0.distcp").read_bytes()[::-1])
    assert list(manifest.find_faults(path)) == ["__1_0.distcp does not match its checksum"]
