"""Where a training runs: its settings, its folder, this process's device, the other processes, what it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core.paths import RunFolder
from anabatic.device.device import Device
from anabatic.parallel.process_groups import World
from anabatic.train.checkpoint.storage import CheckpointInfo

Job = TypeVar("Job", bound=LoopJob, covariant=True)


@dataclass(frozen=True)
class TrainContext(Generic[Job]):
    """What every part of a training needs, put together once.

    Attributes:
        resume_checkpoint: None: the run begins here.
    """

    job: Job
    folder: RunFolder
    device: Device
    world: World
    resume_checkpoint: CheckpointInfo | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of a segment."""
        return self.job.batch.resolved_seq_len
