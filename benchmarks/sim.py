"""What a training step on a simulated NPU costs beside the same step on the CPU: CPU time, by turns in one process.

    python benchmarks/sim.py [--rounds 5] [--steps 20]

The model is a Qwen2 of two layers, so small that what is measured is the price of an operator, not of its arithmetic:
the worst case. The goal is 1.5.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from option_types import positive_int

INSIDE = "ANABATIC_BENCHMARK_INSIDE"


def stepper(device: str) -> Callable[[], None]:
    """Return a function that trains a tiny Qwen2 on `device` for one step."""
    import torch

    from anabatic_testing.tiny_models import build_tiny_qwen2

    torch.manual_seed(0)
    model = build_tiny_qwen2(vocab_size=256, num_key_value_heads=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    ids = torch.randint(0, 256, (4, 64)).to(device)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def main() -> None:
    """Print the ratio of each round, and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--steps", type=positive_int, default=20)
    asked = parser.parse_args()
    if not os.environ.get(INSIDE):
        command = [sys.executable, "-m", "anabatic", "sim", "--", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode)
    steppers = [stepper(device) for device in ("cpu", "npu:0")]
    ratios = []
    for turn in range(asked.rounds + 1):
        costs = []
        for step in steppers:
            start = time.process_time()
            for _ in range(asked.steps):
                step()
            costs.append((time.process_time() - start) / asked.steps)
        if turn:  # the first round warms up
            ratios.append(costs[1] / costs[0])
            print(f"step on the CPU {costs[0] * 1e3:.1f} ms, simulated NPU {costs[1] * 1e3:.1f} ms: {ratios[-1]:.2f}x")
    print(f"median {statistics.median(ratios):.2f}x of the CPU's time (goal 1.5)")


if __name__ == "__main__":
    main()
