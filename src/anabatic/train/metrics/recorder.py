"""What a run writes while it trains: `metrics.jsonl` and `events.jsonl` (the truth), lines, trackers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from anabatic.config.sections.common import LogSettings
from anabatic.core import json_reader
from anabatic.core import log as messages
from anabatic.core.formatting import format_count, format_duration, format_size
from anabatic.core.json_lines import JsonlWriter, replace_nonfinite, to_finite_number
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.train.metrics.trackers import Tracker, open_trackers, warn_switched_off

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
    ("valid_vessel_accuracy", lambda value: f"of vessels: accuracy {100 * value:.2f} %"),
    ("valid_vessel_macro_f1", lambda value: f"macro-F1 {100 * value:.2f} %"),
    ("valid_bpb", lambda value: f"{value:.4f} bits per byte"),
    ("valid_margin", lambda value: f"margin {value:.4f}"),
    ("tokens", lambda value: f"over {format_count(value)} tokens"),
    ("pairs", lambda value: f"over {format_count(value)} pairs"),
    ("answers", lambda value: f"over {format_count(value)} answers"),
    ("segments", lambda value: f"over {format_count(value)} segments"),
    ("questions", lambda value: f"over {format_count(value)} questions"),
)
_MAX_SAMPLE_CHARS = 160


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
        self._trackers: dict[str, Tracker] = open_trackers(log.sinks, folder.root, name, config, resumed_step)
        _truncate_metrics(folder, resumed_step, resumed_step if evaluated_step is None else evaluated_step)
        self._rows = JsonlWriter(folder.metrics)
        self._events = JsonlWriter(folder.events)

    @staticmethod
    def make_silent() -> MetricsRecorder:
        """Return a `MetricsRecorder` that does nothing."""
        return _SilentRecorder()

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

    def log_evaluation(self, step: int, row: dict[str, Any]) -> None:
        """Record a held-out evaluation (valid_loss, valid_accuracy, tokens and more) and print its line."""
        self._write_row(step, "eval", row)
        messages.info(self._format_line(step, row, _EVALUATE_LINE))

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
        pass

    def log_train_step(self, step: int, row: dict[str, Any]) -> None: ...

    def log_evaluation(self, step: int, row: dict[str, Any]) -> None: ...

    def log_sample(
        self, step: int, prompt: str, text: str, *, between: str = "", reward: float | None = None
    ) -> None: ...

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
