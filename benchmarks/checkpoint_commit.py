"""A checkpoint at once by several ranks: seconds, and the CPU time of all ranks, for each GiB.

    python benchmarks/checkpoint_commit.py [--mib 1024] [--ranks 1 2] [--repeats 5] [--folder DIR]

Every rank has shards of the same tensors, of MIB in all. Timed is `storage.save_checkpoint`:
the tensors are written and synced, and the checkpoint is sealed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anabatic.core.paths import RunFolder
from anabatic.parallel.collectives import barrier
from anabatic.parallel.world import World
from anabatic.train.checkpoint import storage
from option_types import positive_int

TENSORS = 16


def cpu_seconds() -> float:
    """Of this process so far, in user and system mode."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def divide(parts: dict[str, torch.Tensor], ranks: int) -> dict[str, torch.Tensor]:
    """Return tensors of which each rank has a part of the same length."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    return {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()}


def save_often(rank: int, ranks: int, port: int, mib: int, repeats: int, folder: str, found: Any) -> None:
    torch.set_num_threads(1)
    storage.ignore_dcp_warnings()
    world = World()
    if ranks > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, timedelta(minutes=5), world_size=ranks, rank=rank)
        world = World(rank, ranks)
    elements = mib * 2**20 // 4 // TENSORS // ranks
    tensors: dict[str, torch.Tensor] = {f"model.{number}": torch.randn(elements) for number in range(TENSORS)}
    if ranks > 1:
        tensors = divide(tensors, ranks)
    for number in range(repeats + 1):  # the first warms up
        content = storage.CheckpointContent(tensors, {"cpu": torch.get_rng_state()}, "{}")
        os.sync()
        barrier(world)
        start, used = time.perf_counter(), cpu_seconds()
        storage.save_checkpoint(RunFolder(folder), 1, content, world)
        if number:
            found.put((rank, time.perf_counter() - start, cpu_seconds() - used))
    if ranks > 1:
        dist.destroy_process_group()


def measure(ranks: int, mib: int, repeats: int, folder: Path, port: int) -> tuple[list[float], list[float]]:
    """Return the seconds of rank 0 and the CPU seconds of all ranks, one for each checkpoint."""
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        arguments = (ranks, port, mib, repeats, temporary, found)
        processes = [context.Process(target=save_often, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        rows = [found.get(timeout=600) for _ in range(ranks * repeats)]
        for process in processes:
            process.join()
    used = [[row[2] for row in rows if row[0] == rank] for rank in range(ranks)]
    return [row[1] for row in rows if row[0] == 0], [sum(one) for one in zip(*used, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=positive_int, default=1024)
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=positive_int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--port", type=positive_int, default=29871)
    options = parser.parse_args()
    gib = options.mib / 1024
    for ranks in options.ranks:
        seconds, used = measure(ranks, options.mib, options.repeats, options.folder, options.port + ranks)
        wall, cpu = (sorted(one / gib for one in values) for values in (seconds, used))
        print(
            f"{ranks} ranks: {statistics.median(wall):.2f} s/GiB ({wall[0]:.2f}-{wall[-1]:.2f}),"
            f" CPU {statistics.median(cpu):.2f} s/GiB ({cpu[0]:.2f}-{cpu[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
