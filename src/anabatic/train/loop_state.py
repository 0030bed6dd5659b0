"""What a training has behind it and what it needs: the loop's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from anabatic.config.sections.common import Evaluate, LogSettings, Optim, Save, Schedule
from anabatic.core.paths import RunFolder
from anabatic.data.batching.batch import Batch
from anabatic.device.device import Device
from anabatic.monitor.usage_window import UsageWindow
from anabatic.parallel.process_groups import World
from anabatic.train.guards.early_stopping import BestTracker
from anabatic.train.metrics.recorder import MetricsRecorder
from anabatic.train.row_log import RowLog
from anabatic.train.step import TrainStep


class BatchStream(Protocol):
    """This rank's micro-batches, without end; each says where the data stand after it."""

    @property
    def source_names(self) -> list[str]:
        """The sources, as `Batch.segment_origins` numbers them."""

    def __next__(self) -> Batch | None:
        """Return the next one; None: a wish to stop came before it was made."""

    def __iter__(self) -> Iterator[Batch | None]:
        """Itself."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that `state` is of."""

    def __enter__(self) -> Any:
        """Itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what it holds."""


@dataclass
class TrainProgress(BestTracker):
    """Host numbers that a checkpoint keeps.

    Attributes:
        evaluated: the last step whose held-out loss they know.
        dropped: where in the data steps begin that are passed over, in micro-batches of all ranks.
        rewinds: of this run; rewound_to: step of the checkpoint that the last one went back to.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    seconds: float = 0.0
    evaluated: int = 0
    last_loss: float | None = None
    loader: dict[str, Any] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    rewinds: int = 0
    rewound_to: int = -1


@dataclass
class LoopContext:
    """What the loop needs.

    Attributes:
        checkpoint_tensors: returns all that a checkpoint holds: model, optimizer, step counters. Asked for at every
            save: FSDP2 gives uneven and offloaded parts new memory in the first forward pass.
        describe_loader: what a logged row also says, from the loader's state.
        evaluate_step: held-out metrics after a step, `{}` when there is nothing to evaluate; every rank calls it.
        save_best_model: write best_model; every rank calls it after the best evaluation so far.
        peak_lr, peak_matrix_lr: of AdamW and of Muon, None without it.
        flops_per_token, peak_flops: for the model FLOP utilisation; 0: unknown, not shown.
        should_eval_at_start: measure before the first step too.
        device_window: what the devices of this machine did meanwhile; None: not known.
        manifest_fields: command and strategy, for whoever looks at a checkpoint.
        optim: what is done about bad steps.
        row_log: told what each step has read; None: nobody asks.
    """

    folder: RunFolder
    metrics: MetricsRecorder
    device: Device
    world: World
    train_step: TrainStep
    batches: BatchStream
    total_steps: int
    micro_steps: int
    schedule: Schedule
    save: Save
    optim: Optim
    eval: Evaluate
    log: LogSettings
    peak_lr: float
    peak_matrix_lr: float | None
    checkpoint_tensors: Callable[[], dict[str, Tensor]]
    identity: dict[str, Any]
    sizes: dict[str, float]
    manifest_fields: dict[str, str]
    evaluate_step: Callable[[int], dict[str, Any]]
    describe_loader: Callable[[dict[str, Any]], dict[str, Any]]
    save_best_model: Callable[[], None]
    flops_per_token: float = 0.0
    peak_flops: float = 0.0
    device_window: UsageWindow | None = None
    should_eval_at_start: bool = False
    row_log: RowLog | None = None
