"""A training run beside its devices, read from `metrics.jsonl` while it is written, or long after."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.core import json_reader, paths
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count, format_duration, format_size
from anabatic.core.json_reader import to_finite_number
from anabatic.core.paths import RunFolder
from anabatic.monitor import value_format
from anabatic.monitor.screen import Style, StyledLine

_ROW_BYTES = 437
"""About what a row takes: how much is read of the end of a long file."""
_MAX_SHOWN_STRAGGLERS = 3
_MAX_SILENT_INTERVALS = 10
"""A run that is alive and has written nothing for so many times its usual distance of rows is marked."""
STRAGGLER_KEYS = ("rank", "place", "reason")
_RANK_FIGURES = (
    ("rank_compute_s", "rank_compute_seconds"),
    ("rank_wait_s", "rank_wait_seconds"),
    ("rank_data_s", "rank_data_wait_seconds"),
)
"""Lists of a row, a value for each rank -> their names for programs."""
_STATE_STYLES: dict[str, Style] = {
    "running": "good",
    "running elsewhere": "good",
    "finished": "good",
    "stopped": "warn",
    "dead": "bad",
    "not started": "dim",
}


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
        self._root = root
        self._paths = RunFolder(root)
        self._metrics = json_reader.JsonlFollower(self._paths.metrics, tail=self._max_rows * _ROW_BYTES)
        self._rows: deque[dict[str, Any]] = deque(maxlen=self._max_rows)
        self._valid: dict[str, Any] = {}
        self._total_steps: int | None = None
        self._unread = 0

    def read(self) -> RunStatus:
        """Return what is known now; of a pipeline, about the stage that began last."""
        if (self._folder / "pipeline.jsonl").exists() and (root := _find_run_folder(self._folder)) != self._root:
            self._open_run(root)
        self._read_new_rows()
        run = RunStatus(str(self._root), valid=self._valid, total_steps=self._read_total_steps())
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
            for event in json_reader.read_json_lines(self._paths.events):
                steps = to_finite_number(event.get("steps")) if event.get("event") in ("start", "resume") else None
                self._total_steps = self._total_steps if steps is None else int(steps)
        return self._total_steps

    def _determine_state(self, run: RunStatus) -> tuple[str, str]:
        if _is_locked(self._root / ".lock"):
            usual = self._estimate_row_interval()
            silent = run.age_s is not None and usual is not None and run.age_s > _MAX_SILENT_INTERVALS * max(usual, 1.0)
            return "running", f"no row for {value_format.format_age(run.age_s or 0)}" if silent else ""
        if _is_finished(self._paths.summary):
            return "finished", ""
        last: dict[str, Any] = next(reversed(list(json_reader.read_json_lines(self._paths.events))), {})
        if last.get("event") == "stop":
            return "stopped", "saved; the same command continues"
        usual = self._estimate_row_interval()
        if run.age_s is not None and usual is not None and run.age_s < 3 * max(usual, 1.0):
            return "running elsewhere", ""
        if not run.last and not last:
            return "not started", ""
        saved = [path.name for path in self._root.glob("checkpoint-*") if path.is_dir()]
        newest = max(saved, key=lambda name: (len(name), name), default="")
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
    stages = [row for row in json_reader.read_json_lines(folder / "pipeline.jsonl") if row.get("event") == "stage"]
    for row in reversed(stages):  # a pipeline: the stage that ran last
        if (folder / str(row.get("stage")) / "events.jsonl").is_file():
            return folder / str(row.get("stage"))
    if not any((folder / name).exists() for name in ("metrics.jsonl", "events.jsonl", "config.yaml")):
        raise ConfigError(f"{folder} holds no run", f"give a run folder{_suggest_runs(folder)}")
    return folder


def _suggest_runs(folder: Path) -> str:
    found = sorted(str(path.parent) for path in folder.glob("*/metrics.jsonl"))[:4] if folder.is_dir() else []
    return f", for example {', '.join(found)}" if found else ": it has a metrics.jsonl"


def _is_locked(lock: Path) -> bool:
    """True when a process of this machine holds the lock; asking for it oneself would be in the way of a start."""
    try:
        inode = lock.stat().st_ino
        table = Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(
        "FLOCK" in words and words[-3].rpartition(":")[2] == str(inode)
        for line in table.splitlines()
        if len(words := line.split()) > 6
    )


def _is_finished(summary: Path) -> bool:
    try:
        text = summary.read_text(encoding="utf-8") if summary.is_file() else "{}"
        return json_reader.loads(text).get("finished") is True
    except (OSError, ValueError, AttributeError):
        return False


_SHOWN_FIGURES: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("lr", lambda value: f"lr {value:.2e}"),
    ("grad_norm", lambda value: f"grad {value:.3f}"),
    ("tokens_per_s", lambda value: f"{format_count(value)} tok/s"),
    ("mfu", lambda value: f"MFU {100 * value:.1f} %"),
    ("memory_bytes", lambda value: f"mem {format_size(value)}"),
    ("data_wait", lambda value: f"wait {100 * value:.1f} %"),
    ("device_util_pct_mean", lambda value: f"util {value:.0f} %"),
    ("device_power_w_mean", lambda value: f"{value:.0f} W"),
    ("energy_wh_per_mtoken", lambda value: f"{value:.3g} Wh/Mtok"),
    ("skipped", lambda value: f"skipped {value:.0f}"),
)


def format_run_lines(run: RunStatus, width: int) -> list[StyledLine]:
    """Return the run's part of the screen."""
    step, total = to_finite_number(run.last.get("step")), run.total_steps
    head: StyledLine = [
        ("bold", "run "),
        ("", value_format.clip_text(run.name, min(len(run.name), max(width - 24, 8)))),
        ("", "  "),
    ]
    head.append((_STATE_STYLES.get(run.state, ""), run.state))
    reason_lines = [("", f"  {run.why}")] if run.why else []
    found: list[StyledLine] = [[*head, *reason_lines]]
    if step is None:
        unread = f": {run.unread} lines of metrics.jsonl are no rows" if run.unread else ""
        return [*found, [("dim", f"no row yet{unread}")]]
    percent = value_format.compute_percent(step, total)
    eta = to_finite_number(run.last.get("eta_s"))
    parts = (
        [f"step {step:.0f}"]
        if percent is None
        else [f"step {step:.0f}/{total}", value_format.format_fixed(percent, " %")]
    )
    if eta is not None and run.state.startswith("running"):
        parts.append(f"ETA {format_duration(eta)}")
    if run.age_s is not None:
        parts.append(f"last row {value_format.format_age(run.age_s)} ago")
    bar: StyledLine = (
        []
        if percent is None or width < 60
        else [("bar", value_format.draw_bar(percent, 10).replace(" ", "░")), ("", "  ")]
    )
    found.append([*bar, ("", "  ".join(parts))])
    loss, valid = to_finite_number(run.last.get("loss")), to_finite_number(run.valid.get("valid_loss"))
    words = (
        f"loss {value_format.format_fixed(loss, digits=4)}" + ("" if valid is None else f"  valid {valid:.4f}") + "  "
    )
    found.append(
        [("", words), ("bar", value_format.draw_history(run.losses, min(max(width - len(words), 0), 60)).lstrip())]
    )
    values = [
        write(known) for name, write in _SHOWN_FIGURES if (known := to_finite_number(run.last.get(name))) is not None
    ]
    slow: list[StyledLine] = [
        [("warn", value_format.clip_text(f"slow: rank {rank} ({place}), {reason}", max(width, 8)))]
        for rank, place, reason in run.stragglers[:_MAX_SHOWN_STRAGGLERS]
    ]
    return [*found, *slow, *_wrap_words(values, width)]


def _wrap_words(words: list[str], width: int) -> list[StyledLine]:
    rows: list[str] = []
    for word in words:
        if rows and len(rows[-1]) + 2 + len(word) <= width:
            rows[-1] += f"  {word}"
        else:
            rows.append(word)
    return [[("", row)] for row in rows]
