"""A small training without a command around it: a real model, data, optimizer and run folder."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from anabatic.config.shared import Device as DeviceConfig
from anabatic.config.shared import Evaluate, Log, Optim, Save, Schedule
from anabatic.core.paths import RunFolder
from anabatic.data.loader import Loader
from anabatic.data.shard_set import ShardSet
from anabatic.device.device import pick
from anabatic.models.forward import Root, summed_loss
from anabatic.models.hf import prepare
from anabatic.parallel.shard import Division, replicate
from anabatic.parallel.world import World
from anabatic.testing.corpora import chat_set
from anabatic.testing.tiny import tiny_model
from anabatic.train import checkpoint, run
from anabatic.train.metrics import Metrics
from anabatic.train.optim import Optimizer
from anabatic.train.progress import Fit, Progress
from anabatic.train.rows import row_log
from anabatic.train.step import TrainStep

DEVICE = DeviceConfig(type="cpu", threads=1)
ALONE = World()
BAD = 319
"""A token whose embedding is not a number: a batch with it has no finite loss."""


def conversations(folder: Path, bad: tuple[int, ...] = (), number: int = 120) -> ShardSet:
    """Write `number` conversations of 12 tokens, those of the numbers `bad` with the bad token."""
    draw = random.Random(0)
    rows = [[draw.randrange(1, 100) for _ in range(12)] for _ in range(number)]
    for row in bad:
        rows[row][5] = BAD
    return chat_set(folder, [(ids, [0] * 6 + [1] * 6) for ids in rows])


@contextmanager
def fitting(
    root: Path,
    data: ShardSet,
    world: World = ALONE,
    steps: int = 20,
    evaluate: Callable[[int, Any], None] = lambda step, model: None,
    **optim: Any,
) -> Iterator[tuple[Fit, Progress]]:
    """Yield what `fit` takes: four conversations a step, a checkpoint every fifth, from the newest checkpoint on.

    Args:
        evaluate: called after every step with its number and the model.
    """
    device = pick(DEVICE)
    folder = RunFolder(root)
    folder.create()
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = float("nan")
    config = Optim(name="adamw", weight_decay=0.0, **optim)
    optimizer = Optimizer(model, config, 1e-3, 1e-3, device, world)
    division = Division("ddp") if world.size > 1 else Division()
    whole = replicate(Root(prepare(model, device.torch)), division, device, world)
    micro = 48 // world.size
    step = TrainStep(whole, functools.partial(summed_loss, chunk_bytes=1 << 16), optimizer, device, world, micro)
    tensors = functools.partial(run.tensors_of, model, optimizer, step)
    torch.manual_seed(0)
    found = checkpoint.newest(folder, world)
    progress = run.restore(found, tensors(), device, world)
    optimizer.number = progress.step
    loader = Loader(
        [(data, None)], seq_len=12, micro_batch_tokens=micro, rank=world.rank, world_size=world.size,
        state=progress.loader or None,
    )  # fmt: skip
    log = Log(every=1, rows=True)
    save = Save(every=5, background="on" if world.size > 1 else "off")
    metrics = Metrics(folder, log, {}, resumed_step=progress.step) if world.first else Metrics.silent()

    def look(number: int) -> dict[str, Any]:
        evaluate(number, model)
        return {}

    with loader, metrics, row_log(log, folder, world, progress.step) as rows:
        yield (
            Fit(
                folder=folder, metrics=metrics, device=device, world=world, step=step, batches=loader,
                total_steps=steps, micro_steps=1, schedule=Schedule(), save=save, optim=config,
                eval=Evaluate(every=1), log=log, peak_lr=1e-3, peak_matrix_lr=None, tensors=tensors, identity={},
                sizes={}, about={"strategy": division.strategy}, evaluate=look, describe=lambda state: {},
                keep_best=lambda: None, rows=rows,
            ),
            progress,
        )  # fmt: skip
