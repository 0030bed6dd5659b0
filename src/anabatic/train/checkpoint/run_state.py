"""Host numbers of a checkpoint, `state.json`: how far the run is, and what a run that resumes must agree on."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from anabatic.core.errors import CheckpointError
from anabatic.train.validation import BestTracker

RUN_STATE_VERSION = 1
"""Raised when an older version could no longer read what is written. Files without a version are read as 1."""


@dataclass
class TrainProgress(BestTracker):
    """Host numbers that a checkpoint keeps.

    Attributes:
        evaluated: the last step whose held-out loss they know.
        dropped: where in the data steps begin that are skipped, in micro-batches of all ranks.
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


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says of its run.

    Attributes:
        identity: settings that decide the numbers, flat: `optim.lr` -> value.
        sizes: sizes that follow from the model or the machine.
        world_size: processes that wrote it.
        about: command and strategy, for `anabatic checkpoint list`.
    """

    progress: TrainProgress
    identity: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    world_size: int = 1
    about: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what is written to `state.json`."""
        return {
            "version": RUN_STATE_VERSION,
            "progress": vars(self.progress),
            "identity": self.identity,
            "sizes": self.sizes,
            "world_size": self.world_size,
            "about": self.about,
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any], path: Path) -> RunState:
        """Return what `state.json` of the checkpoint at `path` says.

        Raises:
            CheckpointError: a newer version of this program wrote it, or it is damaged.
        """
        version = tree.get("version", 1)
        if not isinstance(version, int) or version > RUN_STATE_VERSION:
            raise CheckpointError(
                f"{path}: state.json has version {version}, this program reads up to {RUN_STATE_VERSION}",
                "resume with the version that wrote it, or pip install -U anabatic",
            )
        progress = tree.get("progress", {})
        unknown = sorted(set(progress) - {one.name for one in fields(TrainProgress)})
        if unknown:
            raise CheckpointError(
                f"{path}: state.json counts {', '.join(unknown)}, which this version does not support",
                "resume with the version that wrote it, or pip install -U anabatic",
            )
        return cls(
            TrainProgress(**progress),
            tree.get("identity", {}),
            tree.get("sizes", {}),
            tree.get("world_size", 1),
            tree.get("about", {}),
        )
