"""How long a training waits for a checkpoint: written at once, and in the background; pairs in turn, in one process.

    python benchmarks/checkpoints.py [--mib 200] [--pairs 7] [--folder DIR]

A Qwen2 whose weights and AdamW moments are about so many MiB takes real optimizer steps. Each pair saves once either
way. `stall` is what the loop waits in the call; steps that overlap with the writing are timed too, beside steps that do
not: the writing thread takes a share of the processor and of the memory's bandwidth. The files are synced to the disk
of DIR (default: the current folder's).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.common import Optim, Save
from anabatic.core.paths import RunFolder
from anabatic.data.batching.packing import Batch
from anabatic.device.device import select_device
from anabatic.models.forward import ModelRoot, compute_summed_loss
from anabatic.models.pretrained import prepare_model
from anabatic.parallel.world import World
from anabatic.train import run_folder
from anabatic.train.checkpoint.saver import CheckpointSaver
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.step import TrainStep
from anabatic_testing.tiny_models import build_tiny_qwen2
from option_types import positive_int

TOKENS = 256


def batches() -> Iterator[Batch]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4096, (TOKENS + 1,), generator=draw)
    while True:
        yield Batch(ids[:-1], ids[1:], torch.arange(TOKENS), [0, TOKENS], TOKENS, TOKENS)


class Training:
    def __init__(self, mib: int) -> None:
        device = select_device(DeviceConfig(type="cpu"))
        layers = max(1, round((mib * 2**20 / 12 - 2 * 4096 * 512) / (4 * 512 * 512 + 3 * 512 * 1408)))
        self.model = build_tiny_qwen2(
            vocab_size=4096,
            hidden_size=512,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            intermediate_size=1408,
            max_position_embeddings=TOKENS,
        )
        self.device = device
        self.optimizer = Optimizer(self.model, Optim(name="adamw"), LearningRates(1e-4, 1e-4), device, World())
        loss = functools.partial(compute_summed_loss, chunk_bytes=device.device_row.chunk_bytes)
        self.step = TrainStep(ModelRoot(prepare_model(self.model, device.torch_device)), loss, self.optimizer, TOKENS)
        self.batches = batches()

    def tensors(self) -> dict[str, torch.Tensor]:
        return run_folder.collect_tensors(self.model, self.optimizer, self.step)

    def seconds(self) -> float:
        """Make one step."""
        start = time.perf_counter()
        self.step.run_step(self.batches, 1, 1.0)
        return time.perf_counter() - start


def once(training: Training, saver: CheckpointSaver, number: int) -> tuple[float, float, list[float]]:
    """Save; return the stall, the time until the checkpoint is whole, and the steps meanwhile."""
    os.sync()  # what the one before has left in the page cache is not this one's
    start = time.perf_counter()
    saver.save(number, training.tensors(), {})
    stall = time.perf_counter() - start
    steps = []
    while not (done := saver.take_finished()):
        steps.append(training.seconds())
    return stall, done[0].seconds, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=positive_int, default=200)
    parser.add_argument("--pairs", type=positive_int, default=7)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    training = Training(options.mib)
    held = sum(tensor.nbytes for tensor in training.tensors().values())
    ways = ("off", "on")
    stalls: dict[str, list[float]] = {way: [] for way in ways}
    whole: dict[str, list[float]] = {way: [] for way in ways}
    beside: list[float] = []
    free: list[float] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = RunFolder(temporary)
        savers = {way: CheckpointSaver(folder, Save(background=way), training.device, World()) for way in ways}  # type: ignore[arg-type]
        for number in range(1, options.pairs + 2):  # the first pair warms up: memory of the copies, the page cache
            free += [training.seconds() for _ in range(3)]
            for way in ways:
                stall, seconds, steps = once(training, savers[way], number)
                if number > 1:
                    stalls[way].append(stall)
                    whole[way].append(seconds)
                    beside += steps
    ratios = sorted(b / a for a, b in zip(stalls["off"], stalls["on"], strict=True))
    print(f"{held / 2**20:.0f} MiB, {options.pairs} pairs, medians")
    for way, name in (("off", "at once"), ("on", "in the background")):
        took = f"stall {statistics.median(stalls[way]):.3f} s, whole after {statistics.median(whole[way]):.3f} s"
        print(f"  {name:18} {took}")
    print(f"  stall in the background / at once: {statistics.median(ratios):.1%} ({ratios[0]:.1%}-{ratios[-1]:.1%})")
    slower = f", beside the writing {statistics.median(beside):.3f} s" if beside else ""
    print(f"  a step: {statistics.median(free):.3f} s{slower}")


if __name__ == "__main__":
    main()
