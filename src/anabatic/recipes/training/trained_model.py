"""A model where it is trained: how it is saved, compiled, and given its optimizer and step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core import log
from anabatic.device.device import should_compile
from anabatic.models.forward import ModelRoot
from anabatic.models.fused import installer
from anabatic.models.quantized import iter_quantized_weights
from anabatic.parallel.sharding import ShardingPlan, wrap_ddp
from anabatic.train.context import TrainContext
from anabatic.train.objectives import Objective
from anabatic.train.optim.optimizer import HeadRates, Optimizer
from anabatic.train.sizing import StepSizes
from anabatic.train.step import TrainStep


@dataclass(frozen=True)
class TrainedModel:
    """A model where it is trained.

    Attributes:
        save: writes a folder of the model as it is now; every rank calls it.
        is_chat: it answers in turns: samples are answers to a user.
        head_rates: learning rates of a head of its own.
    """

    root: ModelRoot
    sharding: ShardingPlan
    tokenizer: Any
    save: Callable[[Path], None]
    is_chat: bool = False
    head_rates: HeadRates = HeadRates()

    @property
    def network(self) -> PreTrainedModel:
        """The model itself, without the wrapper that computes losses."""
        return self.root.model

    def compile(self, context: TrainContext[LoopJob], steps: int) -> None:
        """Compile the model's blocks for a run of that many steps, where that pays and is possible."""
        compiled, reason = should_compile(context.job.device, context.device.device_row, steps)
        if context.world.tensor_group.size > 1:
            compiled, reason = False, "layers that add up among processes are not compiled"
        if not context.job.batch.packing:
            compiled, reason = False, "padded batches have another shape each"
        if any(iter_quantized_weights(self.network)):
            compiled, reason = False, "packed weights take turns in the same memory"
        log.info(f"torch.compile {'on' if compiled else 'off'} ({reason})")
        if compiled:
            log.info(f"compiled {installer.compile_blocks(self.network)} modules at first use")

    def make_step(self, context: TrainContext[LoopJob], objective: Objective, sizes: StepSizes) -> TrainStep:
        """Return the training step of this model: its optimizer, and its gradients reduced over the data group."""
        device, world = context.device, context.world
        optimizer = Optimizer(
            self.network,
            context.job.optim,
            sizes.lr,
            sizes.matrix_lr,
            device,
            world,
            self.sharding.get_state_device(device),
            self.head_rates,
        )
        return TrainStep(
            wrap_ddp(self.root, self.sharding, device, world),
            objective.loss_fn,
            optimizer,
            device,
            world,
            sizes.micro_batch_tokens,
            objective.pack_batch,
            objective.metric_sums,
            objective.metric_names,
            partial_params=self.root.partial_params,
        )
