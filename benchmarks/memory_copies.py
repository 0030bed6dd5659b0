"""A copy in the memory of two machines: what the training waits, when it is whole, how soon it is back after a loss.

    python benchmarks/memory_copies.py [--mib 512] [--repeats 5] [--folder DIR]

Two processes play two machines with a folder in memory each, below DIR (default: /dev/shm), and hold shards of MIB in
all. After the copies the second one loses its folder, and both find and load the newest step: the lost part comes from
the first one. Beside it, a checkpoint of the same tensors is written to the disk of the current folder, found and
loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from anabatic.config.pretrain import PretrainJob
from anabatic.config.sections.common import Data, DeviceSettings, Save
from anabatic.core.paths import RunFolder
from anabatic.device.device import select_device
from anabatic.parallel.collectives import barrier
from anabatic.parallel.world import World, init_world, leave_world
from anabatic.train.checkpoint import memory_store, storage
from anabatic.train.checkpoint.memory_copies import MemoryCopies, find_memory_copy
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic_testing.multiprocess import spawn_ranks
from option_types import positive_int

TENSORS = 16


def shards(mib: int, world: World) -> dict[str, torch.Tensor]:
    """Float32 tensors whose rows are divided."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world.size,))
    rows = mib * 2**20 // 4 // TENSORS // world.size // 1024
    return {f"model.{n}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)]) for n in range(TENSORS)}


def timed(call: Callable[[], object], world: World) -> float:
    """Return the seconds of a call that all ranks make at the same time."""
    barrier(world)
    start = time.perf_counter()
    call()
    barrier(world)
    return time.perf_counter() - start


def measure(mib: int, repeats: int, memory: str, run: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    device = select_device(DeviceSettings(type="cpu", threads=1))
    world = init_world(device)
    os.environ[memory_store.MEMORY_DIR_VARIABLE] = f"{memory}/{world.rank}"
    storage.ignore_dcp_warnings()
    folder = RunFolder(run)
    job = PretrainJob(out=run, tokenizer="t", data=Data(train=["stdlib:"]), save=Save(memory_every=1))
    tensors = shards(mib, world)
    copies = MemoryCopies(job, folder, device, world)
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value * 1024 / mib)

    def come_back() -> None:
        found = find_memory_copy(job, folder, world)
        assert found is not None
        found.load(tensors, device)

    def come_back_from_disk() -> None:
        found = storage.find_newest_checkpoint(folder, world)
        assert found is not None
        storage.load_checkpoint(found, tensors, device, world)

    for number in range(1, repeats + 1):
        state = RunState(TrainProgress(step=number))
        stall = timed(lambda: copies.save(number, tensors, state), world)  # noqa: B023 - called at once
        note("memory: the training waits", stall)
        note("memory: whole on both machines", stall + timed(copies.wait, world))
        if world.rank == 1:
            shutil.rmtree(memory_store.get_memory_folder(folder.root))
        note("memory: back after a machine was lost", timed(come_back, world))
        content = storage.CheckpointContent(tensors, device.get_rng_state(), json.dumps(state.to_json()))
        note("disk: written", timed(lambda: storage.save_checkpoint(folder, 1, content, world), world))  # noqa: B023
        note("disk: back, from the page cache", timed(come_back_from_disk, world))
    if world.rank == 0:
        for name, values in seconds.items():
            middle = statistics.median(values)
            print(f"{name:38} {middle:.2f} s/GiB ({min(values):.2f}-{max(values):.2f})")
    leave_world(world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=positive_int, default=512)
    parser.add_argument("--repeats", type=positive_int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as memory, tempfile.TemporaryDirectory(dir=".") as run:
        spawn_ranks(measure, 2, options.mib, options.repeats, memory, run)


if __name__ == "__main__":
    main()
