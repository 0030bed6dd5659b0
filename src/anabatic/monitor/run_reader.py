"""The state and the last figures of a training run, while it is written, or long after."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.core import json_reader, paths
from anabatic.core.errors import ConfigError
from anabatic.core.json_reader import to_finite_number
from anabatic.monitor import value_format
from anabatic.monitor.run_data import CONFIG_FILE, EVENTS_FILE, METRICS_FILE, PIPELINE_FILE, RunFiles

_ROW_BYTES = 437
"""About what a row takes: how much is read of the end of a long file."""
_MAX_SILENT_INTERVALS = 10
"""A run that is alive and has written nothing for so many times its usual distance of rows is marked."""
STRAGGLER_KEYS = ("rank", "place", "reason")
_RANK_FIGURES = (
    ("rank_compute_s", "rank_compute_seconds"),
    ("rank_wait_s", "rank_wait_seconds"),
    ("rank_data_s", "rank_data_wait_seconds"),
)
"""Lists of a row, a value for each rank -> their names for programs."""


@dataclass
class RunStatus:
    """Progress of a run, from its files.

    Attributes:
        state: running, running elsewhere (rows come, but no process of this machine holds the folder), finished,
            stopped (saved by a signal), dead (neither finished nor stopped nor alive), not started.
        why: a word more about the state.
        last: the last training row.
        valid: the last evaluation's row.
        unread: whole lines that are no rows.
    """

    name: str
    state: str = "not started"
    why: str = ""
    total_steps: int | None = None
    last: dict[str, Any] = field(default_factory=dict)
    valid: dict[str, Any] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    unread: int = 0
    age_s: float | None = None

    def get_figures(self) -> dict[str, float]:
        """Return the finite numbers of the last row, by name."""
        names = ("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "memory_bytes", "eta_s")
        return {name: known for name in names if (known := to_finite_number(self.last.get(name))) is not None}

    def get_rank_figures(self) -> list[tuple[str, dict[str, object], float]]:
        """Return (name, labels, value) of what the last row says of single ranks; stragglers have the value 1."""
        found: list[tuple[str, dict[str, object], float]] = []
        for key, name in _RANK_FIGURES:
            values = self.last.get(key)
            for rank, value in enumerate(values if isinstance(values, list) else []):
                if (known := to_finite_number(value)) is not None:
                    found.append((name, {"rank": rank}, known))
        return found + [("straggler", dict(zip(STRAGGLER_KEYS, each, strict=True)), 1.0) for each in self.stragglers]

    @property
    def stragglers(self) -> list[tuple[int, str, str]]:
        """Return (rank, host and device, reason) of the ranks that the last row calls slow."""
        rows = self.last.get("stragglers")
        found = []
        for row in rows if isinstance(rows, list) else []:
            rank = to_finite_number(row.get("rank")) if isinstance(row, dict) else None
            if rank is not None:
                found.append((int(rank), str(row.get("place", "")), str(row.get("reason", ""))))
        return found


class RunReader:
    """Follows the files of one run folder; only what is new is read.

    Args:
        folder: of a run, or of a pipeline.
        rows: training rows to keep.

    Raises:
        ConfigError: there is no run in the folder.
    """

    def __init__(self, folder: Path, rows: int = 600) -> None:
        self._folder, self._max_rows = folder, rows
        self._open_run(_find_run_folder(folder))

    def _open_run(self, root: Path) -> None:
        self._files = RunFiles(root)
        self._metrics = json_reader.JsonlFollower(self._files.metrics, tail=self._max_rows * _ROW_BYTES)
        self._rows: deque[dict[str, Any]] = deque(maxlen=self._max_rows)
        self._valid: dict[str, Any] = {}
        self._total_steps: int | None = None
        self._unread = 0

    def read(self) -> RunStatus:
        """Return what is known now; of a pipeline, about the stage that began last."""
        if (self._folder / PIPELINE_FILE).exists() and (root := _find_run_folder(self._folder)) != self._files.root:
            self._open_run(root)
        self._read_new_rows()
        run = RunStatus(str(self._files.root), valid=self._valid, total_steps=self._read_total_steps())
        run.unread = self._unread + self._metrics.num_unreadable
        if self._rows:
            run.last = self._rows[-1]
            run.losses = [to_finite_number(row.get("loss")) for row in self._rows]
            written = to_finite_number(run.last.get("time"))
            run.age_s = None if written is None else max(time.time() - written, 0.0)
        run.state, run.why = self._determine_state(run)
        return run

    def _read_new_rows(self) -> None:
        anew, rows = self._metrics.read_new_rows()
        if anew:
            self._rows.clear()
            self._unread = 0
        for row in rows:
            self._add_row(row)

    def _add_row(self, row: dict[str, Any]) -> None:
        if to_finite_number(row.get("step")) is None:
            self._unread += 1
        elif row.get("kind") == "train":
            self._rows.append(row)
        elif row.get("kind") == "eval":
            self._valid = row

    def _read_total_steps(self) -> int | None:
        if self._total_steps is None:
            for event in self._files.read_events():
                steps = to_finite_number(event.get("steps")) if event.get("event") in ("start", "resume") else None
                self._total_steps = self._total_steps if steps is None else int(steps)
        return self._total_steps

    def _determine_state(self, run: RunStatus) -> tuple[str, str]:
        if self._files.is_locked:
            usual = self._estimate_row_interval()
            silent = run.age_s is not None and usual is not None and run.age_s > _MAX_SILENT_INTERVALS * max(usual, 1.0)
            return "running", f"no row for {value_format.format_age(run.age_s or 0)}" if silent else ""
        if self._files.is_finished:
            return "finished", ""
        last: dict[str, Any] = next(reversed(self._files.read_events()), {})
        if last.get("event") == "stop":
            return "stopped", "saved; the same command continues"
        usual = self._estimate_row_interval()
        if run.age_s is not None and usual is not None and run.age_s < 3 * max(usual, 1.0):
            return "running elsewhere", ""
        if not run.last and not last:
            return "not started", ""
        newest = self._files.find_newest_checkpoint()
        return "dead", f"continues from {newest}" if newest else "no checkpoint"

    def _estimate_row_interval(self) -> float | None:
        """Seconds between two rows, the median of the last ones."""
        times = [known for row in list(self._rows)[-20:] if (known := to_finite_number(row.get("time"))) is not None]
        gaps = sorted(after - before for before, after in zip(times, times[1:]))  # noqa: B905
        return gaps[len(gaps) // 2] if gaps else None


def _find_run_folder(folder: Path) -> Path:
    if not folder.is_dir():
        guess = paths.suggest_folder(str(folder))
        raise ConfigError(
            f"{folder} is no folder{guess and '.'}{guess}", f"give a run folder{_suggest_runs(folder.parent)}"
        )
    for row in reversed(RunFiles(folder).read_stage_rows()):  # a pipeline: the stage that ran last
        if (stage := RunFiles(folder / str(row.get("stage")))).has_any(EVENTS_FILE):
            return stage.root
    if not any((folder / name).exists() for name in (METRICS_FILE, EVENTS_FILE, CONFIG_FILE)):
        raise ConfigError(f"{folder} holds no run", f"give a run folder{_suggest_runs(folder)}")
    return folder


def _suggest_runs(folder: Path) -> str:
    found = sorted(str(path.parent) for path in folder.glob("*/metrics.jsonl"))[:4] if folder.is_dir() else []
    return f", for example {', '.join(found)}" if found else ": it has a metrics.jsonl"
