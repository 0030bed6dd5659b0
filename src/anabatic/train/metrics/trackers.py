"""Trackers that receive a copy of the metrics. Each package is imported only when a job asks for it.

`metrics.jsonl` is the truth; a tracker that breaks is a nuisance, so its errors are turned into a warning by
`recorder.MetricsRecorder` and never reach the training loop.
"""

from __future__ import annotations

import html
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.paths import write_atomic

INSTALL_HINT = "pip install 'anabatic[track]'"


class Tracker(Protocol):
    """What a tracker must be able to do."""

    def log_numbers(self, step: int, values: dict[str, float]) -> None:
        """Receive the finite numbers of one step."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """Receive one sample."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoardTracker:
    """Event files in `<run>/tensorboard`, written by `torch.utils.tensorboard`."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an interrupted run wrote after the checkpoint (or all of an older run).
        purge = resumed_step + 1 if resumed_step else 0
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log_numbers(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, f"<pre>{html.escape(text)}</pre>", step)

    def close(self) -> None:
        self._writer.close()


class SwanLabTracker:
    """A SwanLab run; `SWANLAB_MODE=local|offline|online` and its login are SwanLab's own settings."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], resumed_step: int) -> None:
        import swanlab

        self._swanlab = swanlab
        swanlab.init(
            project="anabatic",
            experiment_name=name,
            logdir=str(folder / "swanlab"),
            config=config,
            id=_load_run_id(folder / "swanlab.id", resumed_step),
            resume="allow",
        )

    def log_numbers(self, step: int, values: dict[str, float]) -> None:
        self._swanlab.log(values, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self._swanlab.log({name: self._swanlab.Text(text)}, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class WandbTracker:
    """A W&B run; `WANDB_MODE=offline|online` and its login are W&B's own settings."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], resumed_step: int) -> None:
        import wandb

        self._html = wandb.Html
        self._run = wandb.init(
            project="anabatic",
            name=name,
            dir=str(folder),
            config=config,
            id=_load_run_id(folder / "wandb.id", resumed_step),
            resume="allow",
        )
        # W&B refuses to go back in its own step count, as a resumed run does; so the step is a value of ours.
        self._run.define_metric("*", step_metric="step")

    def log_numbers(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def log_text(self, step: int, name: str, text: str) -> None:
        self._run.log({"step": step, name: self._html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Any]] = {"tensorboard": TensorBoardTracker, "swanlab": SwanLabTracker, "wandb": WandbTracker}


def open_trackers(
    names: Sequence[str], folder: Path, name: str, config: dict[str, Any], resumed_step: int
) -> dict[str, Tracker]:
    """Start the trackers in `names` for the run in `folder`, shown there as `name`.

    One that is installed but does not start (no login, no network) is left out with a warning.

    Raises:
        ConfigError: the package of a tracker is not installed.
    """
    sinks: dict[str, Tracker] = {}
    for kind in names:
        try:
            sinks[kind] = TRACKERS[kind](folder, name, config, resumed_step)
        except ImportError as error:
            raise ConfigError(f"log.sinks names {kind}, which cannot be imported: {error}", INSTALL_HINT) from error
        except Exception as error:  # a third party's tracker may raise anything
            warn_switched_off(kind, error)
    return sinks


def warn_switched_off(kind: str, error: Exception) -> None:
    """Warn that the tracker `kind` receives nothing more."""
    reason = " ".join(str(error).split())[:300]
    log.warn(f"{kind} is switched off for this run: {type(error).__name__}: {reason}; metrics.jsonl goes on")


def _load_run_id(path: Path, resumed_step: int) -> str:
    """The run's name inside a tracker: kept when resuming, new for a new run (21 letters, SwanLab's rule)."""
    if resumed_step and path.exists():
        return path.read_text(encoding="utf-8").strip()
    new = uuid.uuid4().hex[:21]
    write_atomic(path, new)
    return new
