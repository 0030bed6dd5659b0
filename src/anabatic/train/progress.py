"""What a training has behind it and what it needs: the loop's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from anabatic.config.shared import Evaluate, Log, Optim, Save, Schedule
from anabatic.core.paths import RunFolder
from anabatic.data.batch import Batch
from anabatic.device.device import Device
from anabatic.monitor.window import Window
from anabatic.parallel.world import World
from anabatic.train.best import Best
from anabatic.train.metrics import Metrics
from anabatic.train.rows import RowLog
from anabatic.train.step import TrainStep


class Batches(Protocol):
    """This rank's micro-batches, without end; each says where the data stand after it."""

    @property
    def names(self) -> list[str]:
        """The sources, as `Batch.rows` numbers them."""

    def __next__(self) -> Batch | None:
        """Return the next one; None: a wish to stop came before it was made."""

    def __iter__(self) -> Iterator[Batch | None]:
        """Itself."""

    def go_to(self, state: dict[str, Any]) -> None:
        """Continue after the batch that `state` is of."""

    def __enter__(self) -> Any:
        """Itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what it holds."""


@dataclass
class Progress(Best):
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
class Fit:
    """What the loop needs.

    Attributes:
        tensors: returns all that a checkpoint holds: model, optimizer, step counters. Asked for at every save: FSDP2
            gives uneven and offloaded parts new memory in the first forward pass.
        describe: what a logged row also says, from the loader's state.
        evaluate: held-out metrics after a step, `{}` when there is nothing to evaluate; every rank calls it.
        keep_best: write best_model; every rank calls it after the best evaluation so far.
        peak_lr, peak_matrix_lr: of AdamW and of Muon, None without it.
        flops_per_token, peak_flops: for the model FLOP utilisation; 0: unknown, not shown.
        begins: measure before the first step too.
        watch: what the devices of this machine did meanwhile; None: not known.
        about: command and strategy, for whoever looks at a checkpoint.
        optim: what is done about bad steps.
        rows: told what each step has read; None: nobody asks.
    """

    folder: RunFolder
    metrics: Metrics
    device: Device
    world: World
    step: TrainStep
    batches: Batches
    total_steps: int
    micro_steps: int
    schedule: Schedule
    save: Save
    optim: Optim
    eval: Evaluate
    log: Log
    peak_lr: float
    peak_matrix_lr: float | None
    tensors: Callable[[], dict[str, Tensor]]
    identity: dict[str, Any]
    sizes: dict[str, float]
    about: dict[str, str]
    evaluate: Callable[[int], dict[str, Any]]
    describe: Callable[[dict[str, Any]], dict[str, Any]]
    keep_best: Callable[[], None]
    flops_per_token: float = 0.0
    peak_flops: float = 0.0
    watch: Window | None = None
    begins: bool = False
    rows: RowLog | None = None
