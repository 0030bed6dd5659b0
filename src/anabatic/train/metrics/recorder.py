"""Record the metrics of a run: `metrics.jsonl` and `events.jsonl`, lines on the terminal, and trackers."""

from __future__ import annotations

import functools
import html
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from anabatic.config.sections.common import LogSettings
from anabatic.core import extras, json_reader, log, plugins
from anabatic.core import log as messages
from anabatic.core.callbacks import GIVEN_CALLBACKS, CallbackList
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count, format_duration, format_size
from anabatic.core.json_reader import JsonlWriter, replace_nonfinite, to_finite_number
from anabatic.core.paths import RunFolder, write_atomic

_MIN_SHOWN_PADDING = 0.01
"""A packed batch has hardly any; less than this share is not worth a word."""
_TRAIN_LINE: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("loss", lambda value: f"loss {value:.4f}"),
    ("reward", lambda value: f"reward {value:.3f}"),
    ("answer_tokens", lambda value: f"{value:.1f} tokens"),
    ("truncated", lambda value: f"truncated {100 * value:.1f} %" if value else ""),
    ("reward_faults", lambda value: f"{value:.0f} FAULTS"),
    ("accuracy", lambda value: f"accuracy {100 * value:.1f} %"),
    ("margin", lambda value: f"margin {value:.4f}"),
    ("lr", lambda value: f"lr {value:.2e}"),
    ("matrix_lr", lambda value: f"matrix lr {value:.2e}"),
    ("stage", lambda value: f"stage {value:.0f}"),
    ("grad_norm", lambda value: f"grad {value:.3f}"),
    ("tokens_per_s", lambda value: f"{format_count(value)} tok/s"),
    ("mfu", lambda value: f"MFU {100 * value:.1f} %"),
    ("memory_bytes", lambda value: f"mem {format_size(value)}"),
    ("padding", lambda value: f"pad {100 * value:.1f} %" if value >= _MIN_SHOWN_PADDING else ""),
    ("data_wait", lambda value: f"wait {100 * value:.1f} %"),
    ("device_util_pct_mean", lambda value: f"util {value:.0f} %"),
    ("device_power_w_mean", lambda value: f"{value:.0f} W"),
    ("eta_s", lambda value: f"ETA {format_duration(value)}"),
)
_EVALUATE_LINE: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("valid_reward", lambda value: f"held-out reward {value:.3f}"),
    ("valid_answer_tokens", lambda value: f"{value:.1f} tokens"),
    ("valid_truncated", lambda value: f"truncated {100 * value:.1f} %" if value else ""),
    ("valid_reward_faults", lambda value: f"{value:.0f} FAULTS"),
    ("valid_loss", lambda value: f"valid loss {value:.4f}"),
    ("valid_perplexity", lambda value: f"perplexity {value:.4g}"),
    ("valid_accuracy", lambda value: f"accuracy {100 * value:.2f} %"),
    ("valid_macro_f1", lambda value: f"macro-F1 {100 * value:.2f} %"),
    ("valid_bpb", lambda value: f"{value:.4f} bits per byte"),
    ("valid_margin", lambda value: f"margin {value:.4f}"),
)
_EVALUATE_COUNTS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("tokens", lambda value: f"over {format_count(value)} tokens"),
    ("pairs", lambda value: f"over {format_count(value)} pairs"),
    ("answers", lambda value: f"over {format_count(value)} answers"),
    ("segments", lambda value: f"over {format_count(value)} segments"),
    ("questions", lambda value: f"over {format_count(value)} questions"),
)
_GROUP_METRIC = re.compile(r"valid_(\w+)_(accuracy|macro_f1)")
"""A score of groups of rows instead of rows: `valid_vessel_accuracy` is that of all rows of each vessel together."""
_MAX_SAMPLE_CHARS = 160


def _list_group_parts(row: dict[str, Any]) -> list[tuple[str, Callable[[float], str]]]:
    found = [match for match in map(_GROUP_METRIC.fullmatch, row) if match]
    return [(match[0], functools.partial(_format_group, match[1], match[2])) for match in found]


def _format_group(group: str, metric: str, value: float) -> str:
    score = f"{100 * value:.2f} %"
    return f"of {group}s: accuracy {score}" if metric == "accuracy" else f"macro-F1 {score}"


class MetricsRecorder:
    """The record of one training run. Rank 0 makes one; the other ranks use `MetricsRecorder.make_silent()`.

    The rows of `metrics.jsonl` are `{"step", "time", "kind": "train" | "eval" | "sample", ...}`, those of
    `events.jsonl` `{"time", "event", ...}`; `time` is Unix time in seconds. Values that are not finite are
    written as `null`. A tracker that fails is switched off with a warning.

    Args:
        folder: an existing run folder.
        log: which trackers, and the run's name in them.
        config: the resolved job, given to the trackers.
        max_steps: optimizer steps of the whole run, for `step/max` and nothing else.
        resumed_step: the step of the checkpoint this run continues from. Rows of later steps, which will be
            trained again, are cut off, so that no step is recorded twice; 0, a new run, drops all older rows.
        evaluated_step: the last evaluation which that checkpoint knows; later ones are made again and cut off too.

    Raises:
        ConfigError: a tracker's package is not installed.
        Failure: the folder cannot be written.
    """

    def __init__(
        self,
        folder: RunFolder,
        log: LogSettings,
        config: dict[str, Any],
        *,
        max_steps: int | None = None,
        resumed_step: int = 0,
        evaluated_step: int | None = None,
    ) -> None:
        self._folder = folder
        self._max_steps = max_steps
        name = log.name or folder.root.resolve().name
        self._callbacks = CallbackList(log.callbacks) if log.callbacks or GIVEN_CALLBACKS.get() else None
        self._trackers: dict[str, Tracker] = open_trackers(log.sinks, folder.root, name, config, resumed_step)
        _truncate_metrics(folder, resumed_step, resumed_step if evaluated_step is None else evaluated_step)
        self._rows = JsonlWriter(folder.metrics)
        self._events = JsonlWriter(folder.events)

    @staticmethod
    def make_silent() -> MetricsRecorder:
        """Return a `MetricsRecorder` that does nothing."""
        return _SilentRecorder()

    @property
    def stop_reason(self) -> str:
        """Why a callback wishes to stop; empty: none does."""
        return "" if self._callbacks is None else self._callbacks.stop_reason

    def call_callbacks(self, method: str, step: int, *arguments: Any) -> None:
        """Call a method of each callback that has it.

        Raises:
            Failure: one raised.
        """
        if self._callbacks is not None:
            self._callbacks.call_method(method, step, *arguments)

    def set_max_steps(self, max_steps: int) -> None:
        """Change the number of steps of the whole run, for `step/max`."""
        self._max_steps = max_steps

    def log_train_step(self, step: int, row: dict[str, Any]) -> None:
        """Record a training step and print its line.

        Args:
            step: optimizer steps done.
            row: any of loss, lr, grad_norm, tokens (so far), tokens_per_s, mfu (0..1), memory_bytes,
                data_wait (0..1), eta_s, skipped (updates skipped so far), device_util_pct_mean, device_power_w_mean;
                other keys are recorded only.
        """
        self._write_row(step, "train", row)
        messages.info(self._format_line(step, row, _TRAIN_LINE))
        self.call_callbacks("on_step", step, step, {"step": step, **row})

    def log_evaluation(self, step: int, row: dict[str, Any]) -> None:
        """Record a held-out evaluation (valid_loss, valid_accuracy, tokens and more) and print its line."""
        self._write_row(step, "eval", row)
        messages.info(self._format_line(step, row, (*_EVALUATE_LINE, *_list_group_parts(row), *_EVALUATE_COUNTS)))
        self.call_callbacks("on_eval", step, step, {"step": step, **row})

    def log_sample(self, step: int, prompt: str, text: str, *, between: str = "", reward: float | None = None) -> None:
        """Record what the model wrote after `prompt`, and print the beginning of it.

        Args:
            between: what parts prompt and text where both are shown as one.
            reward: what it got for it.
        """
        got = {} if reward is None else {"reward": reward}
        self._rows.write({"step": step, "time": _unix_time(), "kind": "sample", "prompt": prompt, "text": text, **got})
        shown = json.dumps(f"{prompt}{between}{text}", ensure_ascii=False).encode("utf-8", "replace").decode()[1:-1]
        messages.info(f"sample: {shown[:_MAX_SAMPLE_CHARS]}{'…' if len(shown) > _MAX_SAMPLE_CHARS else ''}")
        self._call_trackers(lambda sink: sink.log_text(step, f"sample/{prompt[:40]}", prompt + between + text))

    def log_checkpoint(self, step: int, path: Path, **figures: float) -> None:
        """Record that a checkpoint has become whole."""
        self.log_event("checkpoint", step=step, path=str(path), **figures)
        self.call_callbacks("on_save", step, step, path)

    def log_event(self, name: str, /, **fields: Any) -> None:
        """Record that something happened: start, resume, checkpoint, evaluate, stop, device, model, data."""
        self._events.write({"time": _unix_time(), "event": name, **fields})

    def rewind_to(self, step: int, evaluated_step: int) -> None:
        """Cut off the rows of steps that are trained again; trackers keep theirs."""
        self._rows.close()
        _truncate_metrics(self._folder, step, evaluated_step)
        self._rows = JsonlWriter(self._folder.metrics)

    def write_summary(self, values: dict[str, Any]) -> None:
        """Write `summary.json`, whole or not at all.

        Raises:
            Failure: the disk is full or the folder refuses writes.
        """
        write_atomic(self._folder.summary, json.dumps(replace_nonfinite(values), indent=2, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the files and send what the trackers still hold."""
        self._rows.close()
        self._events.close()
        self._call_trackers(lambda sink: sink.close())
        self._trackers.clear()

    def __enter__(self) -> MetricsRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_row(self, step: int, kind: str, row: dict[str, Any]) -> None:
        self._rows.write({"step": step, "time": _unix_time(), "kind": kind, **row})
        prefix = "valid" if kind == "eval" else kind
        numbers = {
            f"{prefix}/{key.removeprefix('valid_')}": float(value)
            for key, value in row.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        self._call_trackers(lambda sink: sink.log_numbers(step, numbers))

    def _format_line(
        self, step: int, row: dict[str, Any], parts: tuple[tuple[str, Callable[[float], str]], ...]
    ) -> str:
        head = (
            f"step {step}" if self._max_steps is None else f"step {step:>{len(str(self._max_steps))}}/{self._max_steps}"
        )
        words = [write(row[key]) for key, write in parts if row.get(key) is not None]
        if row.get("skipped"):
            words.append(f"skipped {row['skipped']}")
        return " | ".join([head, *filter(None, words)])

    def _call_trackers(self, call: Callable[[Tracker], None]) -> None:
        for kind, sink in list(self._trackers.items()):
            try:
                call(sink)
            except Exception as error:  # a third party's tracker may raise anything, and must not stop the training
                del self._trackers[kind]
                warn_switched_off(kind, error)


class _SilentRecorder(MetricsRecorder):
    def __init__(self) -> None:
        self._callbacks = None

    def set_max_steps(self, max_steps: int) -> None: ...

    def log_train_step(self, step: int, row: dict[str, Any]) -> None: ...

    def log_evaluation(self, step: int, row: dict[str, Any]) -> None: ...

    def log_sample(
        self, step: int, prompt: str, text: str, *, between: str = "", reward: float | None = None
    ) -> None: ...

    def log_checkpoint(self, step: int, path: Path, **figures: float) -> None: ...

    def log_event(self, name: str, /, **fields: Any) -> None: ...

    def rewind_to(self, step: int, evaluated_step: int) -> None: ...

    def write_summary(self, values: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def _unix_time() -> float:
    return round(time.time(), 3)


def _truncate_metrics(folder: RunFolder, resumed_step: int, evaluated_step: int) -> None:
    """Rewrite `metrics.jsonl` without the rows that the run is about to write again."""
    if not folder.metrics.exists():
        return
    kept = []
    with open(folder.metrics, "rb") as file:
        before = file.readlines()
    for line in before:
        try:
            row = json_reader.loads(line)
            step, kind = to_finite_number(row["step"]), row.get("kind")
        except (ValueError, KeyError, TypeError):  # torn by a crash, or not a row of ours
            continue
        last = evaluated_step if kind in ("eval", "sample") else resumed_step
        if step is not None and resumed_step and step <= last:
            kept.append(line)
    if len(kept) < len(before):
        write_atomic(folder.metrics, b"".join(kept))


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
        extras.import_optional("tensorboard", "log.sinks tensorboard")
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
        swanlab = extras.import_optional("swanlab", "log.sinks swanlab")

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
        wandb = extras.import_optional("wandb", "log.sinks wandb")

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
            tracker = TRACKERS.get(kind) or plugins.load_plugin("anabatic.sinks", kind)
            sinks[kind] = tracker(folder, name, config, resumed_step)
        except ConfigError:
            raise
        except Exception as error:  # a third party's tracker may raise anything
            warn_switched_off(kind, error)
    return sinks


def warn_switched_off(kind: str, error: Exception) -> None:
    """Warn that the tracker `kind` receives nothing more."""
    reason = " ".join(str(error).split())[:300]
    log.warn(f"{kind} is switched off for this run: {type(error).__name__}: {reason}; metrics.jsonl continues")


def _load_run_id(path: Path, resumed_step: int) -> str:
    """Return the run's id in a tracker: kept when resuming, new for a new run (21 letters, SwanLab's rule)."""
    if resumed_step and path.exists():
        kept = path.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch(r"[0-9a-z]{21}", kept):
            return kept
        log.warn(f"{path} is damaged: what is tracked from now on is a new run there")
    new = uuid.uuid4().hex[:21]
    write_atomic(path, new)
    return new
