"""What a job of thousands of devices asks of its rank 0 and its control plane: real code, ranks that are only data.

    python benchmarks/at_scale.py [--devices 4096] [--only meeting,ranks,plan,files,logs,jobs,failures]

Measured in CPU time, on one host: machine 0 while the launchers of all machines meet (64 to a process; one process
each in rendezvous.py), judging the times of all ranks, planning and sealing a checkpoint, `anabatic explain` on the
logs of all ranks, the files for schedulers. `failures` is estimated from published failure rates.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from anabatic.launch.coordinator import Coordinator
from anabatic.launch.coordinator_client import CoordinatorClient
from anabatic.launch.coordinator_server import CoordinatorServer
from anabatic.launch.hosts.hostfile import parse_hostfile
from anabatic.parallel.mesh import RankGroup
from anabatic.train.checkpoint import manifest
from anabatic.train.checkpoint.dcp_writer import FullCollectionPause, LinearSavePlanner
from anabatic.train.guards.straggler_rules import RankTimes, StragglerDetector
from anabatic.train.guards.stragglers import compute_link_seconds, list_witnesses
from option_types import names_among, positive_int, positive_number

ANABATIC = [sys.executable, "-m", "anabatic"]
PER_MACHINE = 8
TENSORS = 3 * 723
"""Of a Llama 3 70B in a checkpoint: weights and two moments."""
MEASURED_TENSORS = 50
HOURS_BETWEEN_FAILURES = 54 * 24 * 16_384 / 419
"""Of one device: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, 2024, 3.3.4)."""
JOBS = ((8, 7.6), (64, 70.6), (512, 70.6), (4096, 70.6))
"""(devices, billions of parameters): what fits with zero3 and AdamW in fp32."""
BYTES_PER_PARAMETER = 12
LOG_LINES = 200
FACTS = {"recipe": {f"setting.{number}": number for number in range(200)}, "versions": {"torch": "2.13"}}
PATIENCE_SECONDS = 300.0
LAUNCHERS_PER_PROCESS = 64


def cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """In user and system mode."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def time_cpu(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the CPU seconds of a call."""
    start = cpu_seconds()
    for _ in range(repeats):
        call()
    return (cpu_seconds() - start) / repeats


def serve_meeting(port: int, machines: int, end: int, answer: int) -> None:
    """Be machine 0 until `end` is closed; write the CPU seconds to `answer`."""
    start = cpu_seconds()
    server = CoordinatorServer(port, f"127.0.0.1:{port}", "job", Coordinator(machines, machines, time.monotonic))
    os.read(end, 1)
    server.stop()
    os.write(answer, f"{cpu_seconds() - start:.2f}".encode())


def show_meeting(options: argparse.Namespace) -> None:
    """Let the launchers of all machines meet and finish; the server is a process of its own."""
    machines = max(options.devices // PER_MACHINE, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (end, closer), (result, answer) = os.pipe(), os.pipe()
    pids = [os.fork()]
    if not pids[0]:
        os.close(closer)
        serve_meeting(port, machines, end, answer)
        os._exit(0)
    for first in range(0, machines, LAUNCHERS_PER_PROCESS):
        pids.append(os.fork())
        if not pids[-1]:
            os._exit(take_part(port, range(first, min(first + LAUNCHERS_PER_PROCESS, machines))))
    failed = sum(bool(os.waitpid(pid, 0)[1]) for pid in pids[1:])
    os.close(closer)
    os.waitpid(pids[0], 0)
    assert not failed, f"{failed} of {len(pids) - 1} processes"
    print(f"{machines:,} launchers meet and finish: {os.read(result, 100).decode()} s of CPU of machine 0")


def take_part(port: int, numbers: range) -> int:
    """Be these machines' launchers, each with a connection and a thread; return 0 when all have met and finished."""
    ranks: list[int] = []

    def meet(number: int) -> None:
        client = CoordinatorClient("127.0.0.1", port, "job", f"m{number}", FACTS, PATIENCE_SECONDS)
        rank = client.join(number, "127.0.0.1", 29500, PER_MACHINE, PATIENCE_SECONDS)["rank"]
        assert client.wait_for_all(PATIENCE_SECONDS)
        client.leave()
        ranks.append(rank)

    threads = [threading.Thread(target=meet, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(sorted(ranks) != list(numbers))


def show_ranks(options: argparse.Namespace) -> None:
    """Judge the times of all ranks, one of them slow, as every rank does at each logged step."""
    ranks, draw = options.devices, random.Random(0)
    rows = [RankTimes(1 + draw.random() / 50, 0.6, 0.01) for _ in range(ranks)]
    rows[7] = RankTimes(1.6, 0.0, 0.01)
    detector = StragglerDetector(1.25, 3e-4)
    named = [finding for _ in range(3) for finding in detector.judge_row(rows)]
    assert [finding.rank for finding in named] == [7], named
    seconds = time_cpu(lambda: detector.judge_row(rows), 20)
    print(f"a logged step: {20 * ranks:,} bytes gathered on each rank, {seconds * 1e3:.1f} ms of CPU to judge them")
    witnesses = list_witnesses(ranks)
    views = [[1e-3 + draw.random() / 1e4 for _ in range(ranks)] for _ in witnesses]
    seconds = time_cpu(lambda: compute_link_seconds(witnesses, views))
    print(
        f"a probe of links: {4 * ranks * len(witnesses):,} bytes reduced, {seconds * 1e3:.0f} ms of CPU;"
        f" the views of all ranks would be {4 * ranks**2:,} bytes"
    )


def make_plan(rank: int, ranks: int) -> SavePlan:
    """Return what a rank says of its shards: two rows of each tensor, which is wider than tall."""
    planner = LinearSavePlanner(RankGroup(rank, ranks))
    planner.set_up_planner({}, is_coordinator=rank == 0)
    plan, size = planner.create_local_plan(), torch.Size((2 * ranks, 4 * ranks))
    for number in range(MEASURED_TENSORS):
        name, offset = f"optim.model.layers.{number}.mlp.down_proj.weight.exp_avg", torch.Size((2 * rank, 0))
        chunk = ChunkStorageMetadata(offset, torch.Size((2, 4 * ranks)))
        data = TensorWriteData(chunk, TensorProperties(), size)
        plan.items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
    return plan


def show_plan(options: argparse.Namespace) -> None:
    """Plan a checkpoint of sharded tensors on rank 0: what torch gathers, decides, and writes as `.metadata`."""
    ranks = options.devices
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    texts = [pickle.dumps(make_plan(rank, ranks)) for rank in range(ranks)]
    start = cpu_seconds()
    with FullCollectionPause():
        plans = [pickle.loads(text) for text in texts]  # as they are gathered
        planner = LinearSavePlanner(RankGroup(0, ranks))
        global_plan, metadata = planner.create_global_plan(plans)
        metadata.storage_data = {item.index: ("file", 0, 1) for plan in global_plan for item in plan.items}
        text = pickle.dumps(metadata)
    seconds = cpu_seconds() - start
    memory = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    shards = ranks * MEASURED_TENSORS
    with FullCollectionPause():
        reading = time_cpu(lambda: pickle.loads(text)) / shards
    print(
        f"each of {shards:,} shards: {seconds / shards * 1e6:.0f} us of CPU on rank 0, {memory / shards:,.0f} bytes of"
        f" its memory, {len(text) / shards:.0f} bytes of .metadata, {reading * 1e6:.0f} us to read it"
    )
    whole = ranks * TENSORS
    print(
        f"so {TENSORS:,} tensors in {ranks:,} parts: {seconds / shards * whole:,.0f} s of CPU and"
        f" {memory / shards * whole / 1e9:.1f} GB on rank 0, {len(text) / shards * whole / 1e9:.1f} GB of .metadata,"
        f" which every rank reads in {reading * whole:.0f} s of CPU when it continues"
    )


def show_files(options: argparse.Namespace) -> None:
    """Write tiny files of all ranks, then seal, verify and remove the checkpoint as rank 0 does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = folder / ".checkpoint-1.tmp"
        built.mkdir()
        written: dict[str, manifest.FileEntry] = {}
        for rank in range(options.devices):
            for file in (f"__{rank}_0.distcp", f"rng-{rank}.safetensors"):
                (built / file).write_bytes(b"0123456789abcdef")
                written[file] = {"bytes": 16, "crc32": manifest.compute_crc32(built / file)}
        target = folder / "checkpoint-1"
        sealing = time_cpu(lambda: manifest.commit_checkpoint(built, target, 1, "{}", folder / "none", {}, written))
        size = (target / manifest.MANIFEST_FILE).stat().st_size
        looking = time_cpu(lambda: manifest.find_first_fault(target, 0, options.devices))
        removing = time_cpu(lambda: manifest._remove_folder(target))
        print(
            f"a checkpoint of {len(written) + 2:,} files: {sealing:.2f} s of CPU to seal, manifest of {size:,} bytes;"
            f" each rank looks at it for {looking:.2f} s of CPU when it continues; removed in {removing:.2f} s"
        )


def show_logs(options: argparse.Namespace) -> None:
    """Explain a run of which each rank has a log, and one of them the reason."""
    with tempfile.TemporaryDirectory() as name:
        lines = "".join(
            f"[rank 0] 2026-11-22 00:31:09,{n:03d} INFO step {n}/600 | loss 1.9\n" for n in range(LOG_LINES)
        )
        for rank in range(options.devices):
            (Path(name) / f"rank-{rank}.log").write_text(lines)
        with open(Path(name) / f"rank-{options.devices // 2}.log", "a", encoding="utf-8") as log:
            log.write("[ERROR] EI0002: The wait execution of the Notify register times out. HCCL_EXEC_TIMEOUT\n")
        before, began = cpu_seconds(resource.RUSAGE_CHILDREN), time.monotonic()
        said = subprocess.run([*ANABATIC, "explain", name], capture_output=True, text=True, check=False).stdout
        spent = cpu_seconds(resource.RUSAGE_CHILDREN) - before
        assert "EI0002" in said, said
        print(
            f"anabatic explain on {options.devices:,} logs, {options.devices * len(lines) / 1e6:.0f} MB:"
            f" {spent:.1f} s of CPU, {time.monotonic() - began:.1f} s"
        )


def show_jobs(options: argparse.Namespace) -> None:
    """Write the job for Kubernetes and Slurm, and read a hosts file."""
    machines = options.devices // PER_MACHINE
    words = ["--npus", str(PER_MACHINE), "--image", "r/a:1", "--name", "big", "--volume", "pvc:data:/data"]
    job = ["--", "sft", "--model", "/data/model", "--data", "/data/rows.jsonl"]
    for name, command in (
        ("Kubernetes", ["k8s", *words]),
        ("AscendJob", ["k8s", "--kind", "ascendjob", *words]),
        ("Slurm", ["slurm", "--nproc", str(PER_MACHINE)]),
    ):
        sizes = [
            len(
                subprocess.run(
                    [*ANABATIC, "launch", *command, "--nnodes", str(count), *job], capture_output=True, check=True
                ).stdout
            )
            for count in (2, machines)
        ]
        print(f"{name}: {sizes[0]:,} bytes for 2 machines, {sizes[1]:,} for {machines:,}")
    text = "".join(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255} slots={PER_MACHINE}\n" for n in range(9999))
    print(f"a hosts file of 9,999 lines: {time_cpu(lambda: parse_hostfile(text, 'hosts.txt')) * 1e3:.0f} ms of CPU")


def compute_loss(pause: float, written: float, back: float, between: float) -> tuple[float, float]:
    """Return the interval between copies of the training's state with the least loss, and the lost share of the time.

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974: sqrt(2 x pause x
    between), here at least as long as a copy takes to be whole. (J. T. Daly, FGCS 22(3), 2006, has further terms, which
    matter where the pause is not small beside the time between failures.)

    Args:
        pause: seconds that the training waits for a copy.
        written: seconds until the copy can be used; a failure before loses it.
        back: seconds from a failure to the next new step.
        between: seconds between failures of the job.
    """
    interval = max(math.sqrt(2 * pause * between), written)
    return interval, pause / interval + (interval / 2 + written + back) / between


def show_failures(options: argparse.Namespace) -> None:
    """Print the least loss by failures, with copies on disk and in the memory of the machines."""
    print(f"a device: {HOURS_BETWEEN_FAILURES:,.0f} hours between unexpected interruptions")
    for devices, billions in JOBS:
        between = HOURS_BETWEEN_FAILURES * 3600 / devices
        size = billions * BYTES_PER_PARAMETER
        machine = size * PER_MACHINE / devices
        pause = machine / options.copy_gbs
        shards = devices * TENSORS
        disk = size / options.storage_gbs
        # What a copy takes to be whole, and what a new start takes to read it.
        sides = {
            "disk": (disk + shards * options.plan_us / 1e6, disk + shards * options.read_us / 1e6),
        }
        if devices > PER_MACHINE:  # one machine has no other to keep its copy
            sides["memory"] = (machine / options.network_gbs,) * 2
        told = f"{devices:5,} devices, {billions}B: a failure every {between / 3600:7,.1f} h, {size:4,.0f} GB of state"
        print(told)
        for name, (written, read) in sides.items():
            interval, share = compute_loss(pause, written, options.restart_seconds + read, between)
            print(f"  {name:6}: whole after {written:5.1f} s, one every {interval / 60:5.1f} min, {share:.2%} lost")


PARTS = {
    "meeting": show_meeting,
    "ranks": show_ranks,
    "plan": show_plan,
    "files": show_files,
    "logs": show_logs,
    "jobs": show_jobs,
    "failures": show_failures,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=positive_int, default=4096, help=f"{PER_MACHINE} on each machine")
    parser.add_argument("--only", type=names_among(PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--storage-gbs", type=positive_number, default=50.0, help="of the shared file system")
    parser.add_argument("--copy-gbs", type=positive_number, default=5.0, help="of a machine, to its host memory")
    parser.add_argument("--network-gbs", type=positive_number, default=2.5, help="of a machine, between hosts")
    parser.add_argument("--plan-us", type=positive_number, default=37.0, help="of rank 0 for each shard: see `plan`")
    parser.add_argument("--read-us", type=positive_number, default=4.0, help="of each rank for each shard")
    parser.add_argument("--restart-seconds", type=positive_number, default=300.0, help="without reading the state")
    options = parser.parse_args()
    for name in options.only:
        PARTS[name](options)


if __name__ == "__main__":
    main()
