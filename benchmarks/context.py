"""What context parallelism costs: a batch on two processes that share its tokens, beside the same batch on one.

    python benchmarks/context.py [--seq-len 2048] [--rounds 5]

Ideal is half of the work for each of the two. Both sides run in turns, each process with one thread: the CPU time of
the slowest process of a step, the wall clock, and the peak memory of a process beyond what it had before the first
step. The sequence is one document (attention dominates), then documents of an eighth of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paired
from option_types import positive_int

MODEL: dict[str, Any] = dict(
    vocab_size=2048,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=768,
    max_position_embeddings=65536,
)
STEPS = 2
"""Of a turn; one more comes before them, in which memory is allocated."""


def rank_main(context: int, tokens: int, document: int, tuner: str) -> None:
    """Take turns: a line on standard input starts one, a line of JSON ends it."""
    import torch

    from anabatic.config.sections.common import DeviceSettings, Optim, Parallel
    from anabatic.config.sections.train_jobs import Lora
    from anabatic.data.batching.packing import Batch
    from anabatic.device.device import select_device
    from anabatic.models import fused_ops
    from anabatic.models.lora import adapter
    from anabatic.models.model_init import materialize_model
    from anabatic.parallel import sharding
    from anabatic.parallel.world import init_world, leave_world
    from anabatic.train.objectives import make_next_token_objective
    from anabatic.train.optim.optimizer import LearningRates, Optimizer
    from anabatic.train.step import TrainStep
    from anabatic_testing.tiny_models import build_tiny_qwen2

    device = select_device(DeviceSettings(type="cpu", threads=1, dtype="fp32"))
    world = init_world(device, Parallel(context=context))
    torch.manual_seed(0)
    model = build_tiny_qwen2(**MODEL)
    if tuner == "lora":
        adapter.insert_adapter(model, Lora(r=16))
    plan = sharding.resolve_sharding(Parallel(), world, device)
    root = materialize_model(model, plan, device, world)
    if tuner == "lora":
        adapter.init_adapter_weights(model, Lora(r=16), seed=0)
    fused_ops.apply_fused_setting(model, "auto", "cpu")
    objective = make_next_token_objective(root, device, world, document)
    step = TrainStep(
        sharding.wrap_ddp(root, plan, device, world),
        objective.loss_fn,
        Optimizer(model, Optim(name="adamw"), LearningRates(1e-3, 1e-3), device, world),
        tokens,
        objective.pack_batch,
    )
    ids = torch.randint(0, MODEL["vocab_size"], (tokens,))
    borders = list(range(0, tokens + 1, document))
    batch = Batch(ids, ids.roll(-1), torch.arange(document).repeat(tokens // document), borders, tokens, tokens)
    base = paired.peak_memory()
    step.run_step(iter([batch]), 1, 1.0)
    print(json.dumps({"memory": paired.peak_memory() - base}), flush=True)
    while sys.stdin.readline():
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(STEPS):
            step.run_step(iter([batch]), 1, 1.0)
        print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}), flush=True)
    leave_world(world)


class Side:
    """The processes of one side."""

    def __init__(self, context: int, tokens: int, document: int, tuner: str) -> None:
        from anabatic_testing.multiprocess import find_free_port

        port, words = find_free_port(), [context, tokens, document, tuner]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(context), "OMP_NUM_THREADS": "1"}
                | {"LOCAL_WORLD_SIZE": str(context), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            )
            for rank in range(context)
        ]
        self.memory = max(told["memory"] for told in self._read())

    def _read(self) -> list[dict[str, float]]:
        lines = [process.stdout.readline() for process in self.ranks]  # type: ignore[union-attr]
        if not all(lines):
            raise SystemExit("a process has ended")
        return [json.loads(line) for line in lines]

    def take_turn(self) -> tuple[float, float]:
        """CPU time of the slowest process, and the wall clock, of a step."""
        for process in self.ranks:
            print(file=process.stdin, flush=True)
        told = self._read()
        return tuple(max(one[name] for one in told) / STEPS for name in ("cpu", "wall"))  # type: ignore[return-value]

    def close(self) -> None:
        for process in self.ranks:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.ranks:
            process.wait()


def compare(tokens: int, document: int, tuner: str, rounds: int) -> str:
    """Return a row: tokens a second, ratio to the ideal half, memory."""
    sides = [Side(context, tokens, document, tuner) for context in (1, 2)]
    try:
        turns = [[side.take_turn() for side in sides] for _ in range(rounds)]
    finally:
        for side in sides:
            side.close()
    ratios = [[two[at] / (one[at] / 2) for one, two in turns] for at in (0, 1)]
    cpu, wall = (f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios)
    speeds = [tokens / statistics.median(turn[at][0] for turn in turns) for at in (0, 1)]
    memory = [side.memory / 2**20 for side in sides]
    name = f"{tuner}, {tokens // document} x {document}"
    return (
        f"  {name:24} {speeds[0]:9,.0f} {speeds[1]:9,.0f} {cpu:>22} {wall:>22} {memory[0]:8.0f} {memory[1]:8.0f}"
        f" {memory[1] / memory[0]:6.2f}"
    )


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        context, tokens, document, tuner = sys.argv[2:]
        rank_main(int(context), int(tokens), int(document), tuner)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=positive_int, default=2048)
    parser.add_argument("--rounds", type=positive_int, default=5)
    options = parser.parse_args()
    print("tokens per CPU second of the slowest process; cost: of two processes, the ideal half is 1; MiB of a process")
    print(
        f"  {'':24} {'1':>9} {'2':>9} {'cost, CPU time':>22} {'cost, wall clock':>22} {'1':>8} {'2':>8} {'share':>6}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(Path(folder))
        for tuner in ("full", "lora"):
            for parts in (1, 8):
                print(compare(options.seq_len, options.seq_len // parts, tuner, options.rounds), flush=True)


if __name__ == "__main__":
    main()
