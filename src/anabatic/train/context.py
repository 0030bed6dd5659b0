"""The context of a training (settings, folder, device, processes, checkpoint to resume from), and the arguments of its
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core.paths import RunFolder
from anabatic.data.batching.packing import Batch
from anabatic.device.compiled_code import CompiledCode
from anabatic.device.device import Device
from anabatic.monitor.usage_window import UsageWindow
from anabatic.parallel.world import World
from anabatic.plan.model_facts import ModelFacts
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic.train.checkpoint.storage import CheckpointInfo
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic.train.row_log import RowLog
from anabatic.train.sizing import StepSizes
from anabatic.train.step import TrainStep

Job = TypeVar("Job", bound=LoopJob, covariant=True)


@dataclass(frozen=True)
class TrainContext(Generic[Job]):
    """What every part of a training needs, put together once.

    Attributes:
        model: what is known of the model that the training begins with.
        resume_checkpoint: None: the run begins here.
    """

    job: Job
    folder: RunFolder
    device: Device
    world: World
    model: ModelFacts
    resume_checkpoint: CheckpointInfo | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of a segment."""
        return self.job.batch.resolved_seq_len


class BatchStream(Protocol):
    """This rank's micro-batches, without end; each says where the data stand after it."""

    @property
    def source_names(self) -> list[str]:
        """The sources, as `Batch.segment_origins` numbers them."""

    def __next__(self) -> Batch | None:
        """Return the next one; None: a wish to stop came before it was made."""

    def __iter__(self) -> Iterator[Batch | None]:
        """Return itself."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that `state` is of."""

    def __enter__(self) -> Any:
        """Return itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what it holds."""


@dataclass
class LoopContext:
    """What the loop needs.

    Attributes:
        run_state: what a checkpoint says of the run, with its sizes.
        checkpoint_tensors: returns all that a checkpoint holds: model, optimizer, step counters. Asked for at every
            save: FSDP2 gives uneven and offloaded parts new memory in the first forward pass.
        evaluate_step: held-out metrics after a step, `{}` when there is nothing to evaluate; every rank calls it.
        describe_loader: what a logged row also says, from the loader's state.
        save_best_model: write best_model; every rank calls it after the best evaluation so far.
        flops_per_token, peak_flops: for the model FLOP utilisation; 0: unknown, not shown.
        device_window: what the devices of this machine did meanwhile; None: not known.
        should_eval_at_start: measure before the first step too.
        compiled_code: keeps what the steps have compiled; None: nothing is kept.
        row_log: told what each step has read; None: nobody asks.
    """

    context: TrainContext[LoopJob]
    sizes: StepSizes
    train_step: TrainStep
    batches: BatchStream
    metrics: MetricsRecorder
    run_state: Callable[[TrainProgress, StepSizes], RunState]
    checkpoint_tensors: Callable[[], dict[str, Tensor]]
    evaluate_step: Callable[[int], dict[str, Any]]
    describe_loader: Callable[[dict[str, Any]], dict[str, Any]]
    save_best_model: Callable[[], None]
    flops_per_token: float = 0.0
    peak_flops: float = 0.0
    device_window: UsageWindow | None = None
    should_eval_at_start: bool = False
    compiled_code: CompiledCode | None = None
    row_log: RowLog | None = None

    @property
    def job(self) -> LoopJob:
        """The settings."""
        return self.context.job

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return self.context.folder

    @property
    def device(self) -> Device:
        """This process's device."""
        return self.context.device

    @property
    def world(self) -> World:
        """The processes."""
        return self.context.world
