"""What the simulated NPU costs: steps beside the plain CPU, operators, the start of ranks, collectives.

    python benchmarks/sim_speed.py [--only steps,operators,start,collectives] [--rounds 5] [--ranks 8] [--jobs lora]

CPU time throughout, on one thread, because other programs share the machine; the wall clock stands beside it where
ranks wait for each other. Steps and operators take turns with the plain CPU in one process, the first turn warms up.
Goals: a step within 1.1 times of the CPU in the same format, the start of eight ranks within 3 times of one.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from option_types import names_among, parts_of, positive_int

PARTS = ("steps", "operators", "start", "collectives")
STEP_GOAL, START_GOAL = 1.1, 3.0
SIZES = (256, 16 << 20)
"""Bytes of an all-reduce: one whose latency counts, one whose bandwidth does."""
COLLECTIVE_CALLS = 20


class Job(NamedTuple):
    """A step: its number format, LoRA (with peft) or all weights, checkpointed activations, rows and length."""

    dtype: str
    is_lora: bool = False
    is_checkpointed: bool = False
    rows: int = 2
    length: int = 256


JOBS = {
    "pretrain, fp32": Job("float32"),
    "pretrain, bf16": Job("bfloat16"),
    "full, fp32, short rows": Job("float32", rows=8, length=64),
    "lora, fp32, checkpointed": Job("float32", is_lora=True, is_checkpointed=True),
    "lora, bf16, checkpointed": Job("bfloat16", is_lora=True, is_checkpointed=True),
}


def make_step(job: Job, device: str) -> Callable[[], None]:
    """Return a function that trains a Qwen2 of 4 layers and width 256 on `device` for one step."""
    import torch

    from anabatic_testing.tiny_models import build_tiny_qwen2

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704, "vocab_size": 4096}
    model: Any = build_tiny_qwen2(**shape, num_attention_heads=4, num_key_value_heads=2)
    model = model.to(device, getattr(torch, job.dtype))
    if job.is_lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    if job.is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, foreach=True)
    ids = torch.randint(0, 4096, (job.rows, job.length)).to(device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_steps(names: list[str], rounds: int) -> None:
    """Print each job's step on both, and the median of the ratios."""
    for name in names:
        both = [make_step(JOBS[name], device) for device in ("cpu", "npu:0")]
        times = [[_time_calls(step, 1) for step in both] for _ in range(rounds + 1)][1:]
        cpu, npu = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = sorted(npu / cpu for cpu, npu in times)
        print(
            f"step {name}: CPU {cpu * 1e3:.0f} ms, simulated NPU {npu * 1e3:.0f} ms, median"
            f" {statistics.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f}; goal {STEP_GOAL})",
            flush=True,
        )


def _time_calls(call: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


def make_operators(device: str) -> dict[str, Callable[[], object]]:
    """Small operators, whose price is the way to their kernel."""
    import torch

    left, right, into = (torch.randn(16, 16, device=device) for _ in range(3))
    return {
        "add": lambda: left + right,
        "add_": lambda: into.add_(right),
        "mm": lambda: left @ right,
        "sum": lambda: left.sum(),
        "softmax": lambda: torch.softmax(left, -1),
        "cat": lambda: torch.cat([left, right]),
        "copy_": lambda: into.copy_(left),
        "to bf16": lambda: left.bfloat16(),
        "view": lambda: left.view(256),
        "8 in _foreach_add_": lambda: torch._foreach_add_([into] * 8, 1.0),
    }


def measure_operators(rounds: int) -> None:
    """Print nanoseconds per call: the least of the rounds, because everything else only adds to it."""
    both = [make_operators(device) for device in ("cpu", "npu:0")]
    for name in both[0]:
        times = [[_time_calls(side[name], 1000) for side in both] for _ in range(rounds + 1)][1:]
        cpu, npu = (min(column) * 1e9 for column in zip(*times, strict=True))
        print(f"operator {name}: CPU {cpu:.0f} ns, simulated NPU {npu:.0f} ns, {npu - cpu:+.0f}", flush=True)


RANK_PROGRAM = """
import os
import torch
import torch.distributed
from transformers import AutoModelForCausalLM, Qwen2Config

torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("hccl")
shape = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
model = AutoModelForCausalLM.from_config(Qwen2Config(**shape, num_hidden_layers=2, intermediate_size=64)).npu()
model = torch.nn.parallel.DistributedDataParallel(model)
ids = torch.randint(0, 128, (2, 16)).npu()
optimizer = torch.optim.AdamW(model.parameters())
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
torch.npu.synchronize()
torch.distributed.destroy_process_group()
"""

COLLECTIVE_PROGRAM = f"""
import os, resource, time
import torch
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
for size in {SIZES}:
    data = torch.ones(size // 4, device="npu")
    for turn in range(2):
        dist.barrier()
        torch.npu.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range({COLLECTIVE_CALLS}):
            dist.all_reduce(data)
            torch.npu.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if rank == 0:
        print(size, wall / {COLLECTIVE_CALLS}, cpu / {COLLECTIVE_CALLS}, flush=True)
dist.destroy_process_group()
"""


def run_ranks(program: str, ranks: int) -> tuple[float, float, str]:
    """Return CPU seconds of all processes, wall seconds and what a program printed under `torchrun`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8")
        words = ["torchrun", "--standalone", "--nproc_per_node", str(ranks), str(path)]
        command = [sys.executable, "-m", "anabatic", "sim", "--npus", str(ranks), "--", *words]
        before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, time.monotonic() - wall, done.stdout


def measure_start(ranks: int, rounds: int) -> None:
    """Print what one rank and several cost from the command to the end of the first step."""
    turns = [(run_ranks(RANK_PROGRAM, 1), run_ranks(RANK_PROGRAM, ranks)) for _ in range(rounds)]
    for index, count in enumerate((1, ranks)):
        cpu, wall = (statistics.median(turn[index][column] for turn in turns) for column in (0, 1))
        print(f"start of {count} under torchrun: {cpu:.1f} CPU seconds, {wall:.1f} s of wall time")
    ratio = statistics.median(many[0] / one[0] for one, many in turns)
    print(f"start of {ranks} ranks: {ratio:.2f}x of the CPU time of one (goal {START_GOAL:g})", flush=True)


def measure_collectives(ranks: int) -> None:
    """Print the time of an all-reduce that rank 0 waits for, over two ranks and several."""
    for count in dict.fromkeys((2, ranks)):
        for line in run_ranks(COLLECTIVE_PROGRAM, count)[2].splitlines():
            size, wall, cpu = (float(word) for word in line.split())
            rate = f", {size / wall / 1e9:.2f} GB/s" if size > SIZES[0] else ""
            print(
                f"all-reduce of {size:.0f} bytes over {count} ranks: {wall * 1e6:.0f} us of wall time{rate},"
                f" {cpu * 1e6:.0f} us of CPU time of rank 0",
                flush=True,
            )


def main() -> None:
    """Measure the parts that are asked for; steps and operators inside of a simulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_among(PARTS), default=list(PARTS))
    parser.add_argument("--jobs", type=parts_of(JOBS), default=list(JOBS))
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--ranks", type=positive_int, default=8)
    asked = parser.parse_args()
    if os.environ.get("ANABATIC_SIM_SEGMENT"):
        import torch

        torch.set_num_threads(1)
        if "steps" in asked.only:
            measure_steps(asked.jobs, asked.rounds)
        if "operators" in asked.only:
            measure_operators(asked.rounds)
        return
    if {"steps", "operators"} & set(asked.only):
        command = [sys.executable, "-m", "anabatic", "sim", "--", sys.executable, *sys.argv]
        if code := subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
            sys.exit(code)
    if "start" in asked.only:
        measure_start(asked.ranks, asked.rounds)
    if "collectives" in asked.only:
        measure_collectives(asked.ranks)


if __name__ == "__main__":
    main()
