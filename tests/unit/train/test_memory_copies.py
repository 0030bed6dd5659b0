"""Copies in the machines' memory: whole steps alone are used, of the same run, fetched where a machine lost them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from anabatic.config.pretrain import PretrainJob
from anabatic.config.sections.common import Data, Save
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core.errors import CheckpointError, Failure
from anabatic.core.paths import RunFolder
from anabatic.device.device import select_device
from anabatic.parallel.collectives import barrier
from anabatic.parallel.sharded_tensors import shard_like
from anabatic.parallel.world import World, init_world, leave_world
from anabatic.train import run_folder
from anabatic.train.checkpoint import memory_store, storage
from anabatic.train.checkpoint.memory_copies import MemoryCopies, MemoryCopy, find_memory_copy
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic_testing.multiprocess import spawn_ranks

DEVICE = select_device(DeviceConfig(type="cpu", threads=1))


def make_job(root: Path, every: int = 1) -> PretrainJob:
    return PretrainJob(
        out=str(root), tokenizer="t", data=Data(train=["stdlib:"]), save=Save(memory_every=every, background="off")
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(memory_store.MEMORY_DIR_VARIABLE, str(tmp_path / "memory"))
    root = RunFolder(tmp_path / "run")
    root.create_folder()
    return root


def copy_steps(folder: RunFolder, *steps: int) -> MemoryCopies:
    copies = MemoryCopies(make_job(folder.root), folder, DEVICE, World())
    for step in steps:
        copies.save(step, tensors(float(step)), RunState(TrainProgress(step=step)))
    copies.wait()
    return copies


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((3, 5), value),
        "model.half": torch.full((7,), value, dtype=torch.bfloat16),
        "model.none": torch.empty(0, 4),
        "step.c": torch.tensor(int(value)),
    }


def find(folder: RunFolder) -> MemoryCopy | None:
    return find_memory_copy(make_job(folder.root), folder, World())


def test_the_newest_step_comes_back_with_the_random_numbers(folder: RunFolder) -> None:
    copies = copy_steps(folder, 3)
    copies.save(6, tensors(6.0), RunState(TrainProgress(step=6, tokens=99)))
    expected = torch.rand(4)
    copies.wait()
    kept = sorted(path.name for path in memory_store.get_memory_folder(folder.root).iterdir())
    assert kept == ["rank-0.own-6.bin", "rank-0.own-6.json", "shared.0-6.bin", "shared.0-6.json"]
    found = run_folder._find_newest_state(make_job(folder.root), folder, World())
    assert found is not None and found.step == 6 and found.state.progress == TrainProgress(step=6, tokens=99)
    filled = tensors(0.0)
    storage.load_checkpoint(found, filled, DEVICE, World())
    assert all(torch.equal(filled[name], value) for name, value in tensors(6.0).items())
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("damage", ["flip", "cut", "seal", "torn"])
def test_a_damaged_copy_is_not_used(folder: RunFolder, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    copy_steps(folder, 3)
    place = memory_store.get_memory_folder(folder.root)
    part, seal = place / "shared.0-3.bin", place / "shared.0-3.json"
    content = part.read_bytes()
    if damage == "flip":
        part.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "cut":
        part.write_bytes(content[:-1])
    elif damage == "seal":
        seal.unlink()
    else:
        seal.write_text(seal.read_text()[:50])
    assert find(folder) is None
    assert "the copies in memory are not used: of step 3 no machine has shared" in caplog.text
    assert not list(place.iterdir())


def test_copies_of_an_earlier_run_in_the_same_folder_are_removed(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    copy_steps(folder, 3)
    shutil.rmtree(folder.root)
    folder.create_folder()
    assert find(folder) is None and "they are of an earlier run in this folder" in caplog.text
    assert not list(memory_store.get_memory_folder(folder.root).iterdir())


def test_copies_of_another_division_are_not_used(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    copy_steps(folder, 3)
    job = make_job(folder.root)
    job.parallel.strategy = "zero3"
    assert find_memory_copy(job, folder, World()) is None
    assert "other settings of `parallel`" in caplog.text


def test_without_the_setting_what_a_killed_run_left_is_removed(folder: RunFolder) -> None:
    copy_steps(folder, 3)
    shutil.rmtree(folder.root)  # with all that says that there were copies
    folder.create_folder()
    assert run_folder._find_newest_state(make_job(folder.root, 0), folder, World()) is None
    assert not memory_store.get_memory_folder(folder.root).exists()


def test_they_are_removed_at_the_end_and_kept_after_a_failure(folder: RunFolder) -> None:
    place = memory_store.get_memory_folder(folder.root)
    with pytest.raises(Failure), copy_steps(folder, 3):
        raise Failure("a rank was lost")
    assert find(folder) is not None
    with copy_steps(folder, 6):
        assert place.exists()
    assert not place.exists()


def test_what_a_rewind_has_left_is_not_continued(folder: RunFolder) -> None:
    copies = copy_steps(folder, 3)
    copies.discard()
    assert find(folder) is None
    copies.save(2, tensors(2.0), RunState(TrainProgress(step=2)))
    copies.wait()
    found = find(folder)
    assert found is not None and found.step == 2


def test_a_newer_checkpoint_of_the_disk_is_taken(folder: RunFolder) -> None:
    copy_steps(folder, 3)
    content = storage.CheckpointContent(
        tensors(9.0), DEVICE.get_rng_state(), json.dumps(RunState(TrainProgress(step=9)).to_json())
    )
    storage.ignore_dcp_warnings()
    path = storage.save_checkpoint(folder, 9, content, World())
    found = run_folder._find_newest_state(make_job(folder.root), folder, World())
    assert found is not None and found.memory is None and found.step == 9
    (path / "state.json").unlink()  # broken: memory is what remains
    copy_steps(folder, 3)
    found = run_folder._find_newest_state(make_job(folder.root), folder, World())
    assert found is not None and found.memory is not None and found.step == 3


def test_other_tensors_are_refused_before_any_is_filled(folder: RunFolder) -> None:
    copy_steps(folder, 3)
    found = find(folder)
    assert found is not None
    filled = {**tensors(0.0), "step.c": torch.zeros(2)}
    with pytest.raises(CheckpointError, match="does not fit: step.c is torch.int64") as caught:
        found.load(filled, DEVICE)
    assert "--save.memory-every 0" in str(caught.value.hint) and not filled["model.a"].any()


def test_too_little_memory_is_said_before_anything_is_copied(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabatic.train.checkpoint.memory_copies.get_free_host_memory", lambda: 10)
    with pytest.raises(Failure, match="copies in memory need .* more of each machine .* 10 B are free"):
        copy_steps(folder, 3)
    assert not list(memory_store.get_memory_folder(folder.root).iterdir())


def sharded(value: float, world: World) -> dict[str, torch.Tensor]:
    """A tensor of 5 rows over the ranks, unevenly, and one that all hold."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.size,))
    whole = distribute_tensor(torch.arange(15.0).view(5, 3) + value, mesh, [Shard(0)])
    return {"model.rows": shard_like(whole.to_local().clone(), whole), "model.all": torch.full((4,), value)}


def lose_and_find(root: str) -> None:
    """Each process is a machine; that of rank 1 loses its memory, then that of two neighbours."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    world = init_world(DEVICE)
    os.environ[memory_store.MEMORY_DIR_VARIABLE] = f"{root}/memory-{world.rank}"
    folder = RunFolder(f"{root}/run")
    job = make_job(folder.root)
    place = memory_store.get_memory_folder(folder.root)
    copies = MemoryCopies(job, folder, DEVICE, world)
    for step in (4, 8):
        copies.save(step, sharded(float(step), world), RunState(TrainProgress(step=step)))
    copies.wait()
    barrier(world)
    held = (world.rank - 1) % world.size
    names = {path.name for path in place.glob("*.json")}
    assert names == {f"rank-{world.rank}.own-8.json", f"rank-{held}.held-8.json", f"shared.{world.rank}-8.json"}
    if world.rank == 1:
        shutil.rmtree(place)
    barrier(world)
    found = find_memory_copy(job, folder, world)
    assert found is not None and found.step == 8
    filled = sharded(0.0, world)
    found.load(filled, DEVICE)
    for name, tensor in sharded(8.0, world).items():
        assert torch.equal(filled[name], tensor), name
    if world.rank in (1, 2):  # rank 1's part was with rank 2
        shutil.rmtree(place)
    barrier(world)
    assert find_memory_copy(job, folder, world) is None and not list(place.iterdir())
    leave_world(world)


@pytest.mark.process
def test_a_machine_gets_its_part_from_its_neighbour_but_not_from_two_lost_ones(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    spawn_ranks(lose_and_find, 3, str(tmp_path))
