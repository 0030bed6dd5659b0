"""A small training without a command around it: a real model, data, optimizer and run folder."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from anabatic.config.sections.common import Data, Evaluate, LogSettings, Optim, Save, Schedule
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sft import SftJob
from anabatic.core.paths import RunFolder
from anabatic.data.batching.loader import Loader
from anabatic.data.shards.reader import ShardSet
from anabatic.device.device import select_device
from anabatic.models.forward import ModelRoot, compute_summed_loss
from anabatic.models.pretrained import prepare_model
from anabatic.parallel.sharding import ShardingPlan, wrap_ddp
from anabatic.parallel.world import World
from anabatic.plan.model_facts import find_model_facts
from anabatic.train import run_folder
from anabatic.train.checkpoint import storage
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic.train.context import LoopContext, TrainContext
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic.train.optim.optimizer import LearningRates, Optimizer
from anabatic.train.row_log import RowLog
from anabatic.train.sizing import StepSizes
from anabatic.train.step import TrainStep
from anabatic_testing.tiny_corpora import write_chat_shards
from anabatic_testing.tiny_models import build_tiny_model

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
    return write_chat_shards(folder, [(ids, [0] * 6 + [1] * 6) for ids in rows])


@contextmanager
def fitting(
    root: Path,
    data: ShardSet,
    world: World = ALONE,
    steps: int = 20,
    evaluate: Callable[[int, Any], None] = lambda step, model: None,
    **optim: Any,
) -> Iterator[tuple[LoopContext, TrainProgress]]:
    """Yield what `fit` takes: four conversations a step, a checkpoint every fifth, from the newest checkpoint on.

    Args:
        evaluate: called after every step with its number and the model.
    """
    device = select_device(DEVICE)
    folder = RunFolder(root)
    folder.create_folder()
    model = build_tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = float("nan")
    config = Optim(name="adamw", weight_decay=0.0, **optim)
    optimizer = Optimizer(model, config, LearningRates(1e-3, 1e-3), device, world)
    division = ShardingPlan("ddp") if world.size > 1 else ShardingPlan()
    whole = wrap_ddp(ModelRoot(prepare_model(model, device.torch_device)), division, device, world)
    micro = 48 // world.size
    step = TrainStep(whole, functools.partial(compute_summed_loss, chunk_bytes=1 << 16), optimizer, micro)
    tensors = functools.partial(run_folder.collect_tensors, model, optimizer, step)
    torch.manual_seed(0)
    found = storage.find_newest_checkpoint(folder, world)
    progress = run_folder.restore_checkpoint(found, tensors(), device, world)
    optimizer.step_number = progress.step
    loader = Loader(
        [(data, None)],
        seq_len=12,
        micro_batch_tokens=micro,
        rank=world.rank,
        world_size=world.size,
        state=progress.loader or None,
    )
    log = LogSettings(every=1, rows=True)
    save = Save(every=5, background="on" if world.size > 1 else "off")
    job = SftJob(
        model="model",
        data=Data(train=["rows.jsonl"]),
        schedule=Schedule(),
        save=save,
        optim=config,
        eval=Evaluate(every=1),
        log=log,
    )
    metrics = (
        MetricsRecorder(folder, log, {}, resumed_step=progress.step)
        if world.is_main_process
        else MetricsRecorder.make_silent()
    )

    def look(number: int) -> dict[str, Any]:
        evaluate(number, model)
        return {}

    with loader, metrics, closing(RowLog(folder, world, progress.step)) if log.rows else nullcontext() as rows:
        yield (
            LoopContext(
                context=TrainContext(job, folder, device, world, find_model_facts(job)),
                sizes=StepSizes(micro, 1, steps, 1e-3, 0.0),
                train_step=step,
                batches=loader,
                metrics=metrics,
                run_state=lambda progress, sizes: RunState(progress, about={"strategy": division.strategy}),
                checkpoint_tensors=tensors,
                evaluate_step=look,
                describe_loader=lambda state: {},
                save_best_model=lambda: None,
                row_log=rows,
            ),
            progress,
        )
