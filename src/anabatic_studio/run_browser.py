"""Run folders as the page of runs asks for them: a list, curves of a bounded length, what else a run has written.

Reading takes a while; the server does it in its own thread, one question at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from anabatic.core.errors import ConfigError, DataError
from anabatic.core.json_reader import JsonlFollower
from anabatic.monitor.run_data import (
    EVALUATION_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    MetricsRows,
    Points,
    RunFiles,
    downsample_points,
    read_run,
    smooth_points,
)
from anabatic.monitor.run_reader import RunReader
from anabatic.train.checkpoint import listing as listing_module
from anabatic.train.report import comparison, page
from anabatic_studio import evaluations, pickers

MAX_DEPTH = 4
MAX_FOLDERS = 5000
MAX_RUNS = 200
MAX_OPEN_RUNS = 16
"""Runs whose curves are kept in memory."""
MAX_CURVE_POINTS = 1000
"""Of a curve, in an answer."""
MAX_STORED_POINTS = 4096
"""Of a curve that is followed, in memory."""
MAX_READ_BYTES = 4 << 20
"""Of a file of metrics, at once: about a quarter of a second. The page asks again until it has all."""
SCAN_INTERVAL_SECONDS = 5.0

_SMOOTHED_COLUMNS = (
    "loss",
    "accuracy",
    "grad_norm",
    "tokens_per_s",
    "mfu",
    "device_util_pct_mean",
    "device_power_w_mean",
)
_RUN_FILES = (METRICS_FILE, EVENTS_FILE, EVALUATION_FILE)
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_SKIPPED_PREFIXES = ("best_model", "final_model", "checkpoint-")


@dataclass
class _RunEntry:
    folder: Path
    name: str
    reader: RunReader | None
    """None: a folder with the results of an evaluation alone."""


class FollowedMetrics:
    """The rows of one run that may go on, thinned where they are many."""

    def __init__(self, folder: Path) -> None:
        self._file = JsonlFollower(RunFiles(folder).metrics, max_bytes=MAX_READ_BYTES)
        self._token = ""
        self.rows = MetricsRows()

    def read_new_rows(self) -> None:
        """Read what is new, as much of it as is read at once."""
        anew, rows = self._file.read_new_rows()
        if anew:
            self.rows, self._token = MetricsRows(), secrets.token_hex(4)
        for row in rows:
            self.rows.add_row(row)
        held = self.rows
        for key, points in held.columns.items():
            if len(points) > MAX_STORED_POINTS:
                held.columns[key] = dict(downsample_points(sorted(points.items()), MAX_STORED_POINTS // 2))
        held.samples, held.level_counts = _drop_every_second(held.samples), _drop_every_second(held.level_counts)
        held.evaluations = _drop_every_second(held.evaluations)

    @property
    def version(self) -> str:
        """What was read, in a word: another word after anything new."""
        return f"{self._token}.{self._file.offset}"

    @property
    def read_fraction(self) -> float:
        """Of the file that was read, 0 to 1."""
        return self._file.offset / (self._file.offset + self._file.bytes_behind) if self._file.bytes_behind else 1.0


def _drop_every_second(rows: dict[_Key, _Value]) -> dict[_Key, _Value]:
    return rows if len(rows) <= MAX_STORED_POINTS else dict(list(rows.items())[::2])


class RunBrowser:
    """All runs below a folder. A run is asked for by its id from `list_runs`; nothing that is asked becomes a path.

    Args:
        root: an existing folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._entries: dict[str, _RunEntry] = {}
        self._num_omitted = 0
        self._scanned_at = float("-inf")
        self._open_runs: OrderedDict[str, FollowedMetrics] = OrderedDict()

    def list_runs(self) -> dict[str, Any]:
        """Return `runs`, those that run first, then the latest, and `left_out`, how many more there are."""
        if time.monotonic() - self._scanned_at > SCAN_INTERVAL_SECONDS:
            self._scan_folders()
            self._scanned_at = time.monotonic()
        rows = []
        for key, found in list(self._entries.items()):
            try:
                evaluated = _read_change_time(found.folder / EVALUATION_FILE)
                if found.reader is None:
                    rows.append(_describe_evaluation(key, found, evaluated))
                    continue
                run = found.reader.read()
            except (ConfigError, OSError):  # the folder has just gone, or may not be read
                del self._entries[key]
                continue
            known = run.get_figures()
            rows.append(
                {
                    "id": key,
                    "name": found.name,
                    "state": run.state,
                    "why": run.why,
                    "steps": run.total_steps,
                    "age_s": run.age_s,
                    "valid_loss": run.valid.get("valid_loss"),
                    "evaluated": evaluated,
                    **{name: known.get(name) for name in ("step", "loss", "tokens_per_s", "eta_s")},
                }
            )
        rows.sort(key=_sort_key)
        return {"runs": rows, "left_out": self._num_omitted}

    def get_name(self, key: str) -> str:
        """Return the name of a run: its folder, relative to the folder of the runs.

        Raises:
            KeyError: no listed run has this id.
        """
        return self._entries[key].name

    def find_keys(self, folder: Path) -> list[str]:
        """Return the id of a run folder below the root, of a pipeline those of its stages; empty: there is none yet."""
        try:
            path = self._root / folder.absolute().relative_to(self._root.absolute())
        except ValueError:
            return []
        if RunFiles(path).has_any(*_RUN_FILES):
            return [_make_key(path)]
        started = [row for row in RunFiles(path).read_stage_rows() if row.get("state") == "run"]
        names = filter(_STAGE_NAME.fullmatch, dict.fromkeys(str(row.get("stage")) for row in started))
        return [_make_key(path / name) for name in names if RunFiles(path / name).has_any(*_RUN_FILES)]

    def get_curves(self, key: str, have: str = "") -> dict[str, Any]:
        """Return the curves of a run.

        Args:
            have: the version that the reader has; when there is nothing new, no curves are returned.

        Returns:
            `version`, `share` of the file that was read so far, and `get_curves`: by name `steps`, `values` and, for a
            noisy one, `smooth_points`; each a pair of lists of about `MAX_CURVE_POINTS` numbers; with
            them `spikes`: steps that were skipped, see `get_details`.

        Raises:
            KeyError: no listed run has this id.
        """
        followed = self._follow_run(key)
        answer: dict[str, Any] = {"version": followed.version, "share": followed.read_fraction}
        if have != followed.version:
            answer["curves"] = {
                name: _build_curve(name, points) for name, points in followed.rows.sorted_curves().items() if points
            }
            answer["spikes"] = RunFiles(self._entries[key].folder).read_bad_steps()
        return answer

    def get_details(self, key: str) -> dict[str, Any]:
        """Return what a run has written beside its curves: facts, samples, events, config, checkpoints, logs, notes.

        Raises:
            KeyError: no listed run has this id.
        """
        found = self._entries[key]
        followed = self._follow_run(key)
        run = read_run(found.folder, found.name, followed.rows)
        try:
            rows = listing_module.list_checkpoints(found.folder, followed.rows.evaluations.values())
            checkpoints = [{**row, "path": pickers.format_path(Path(row["path"]))} for row in rows]
        except (DataError, OSError):  # there is none, or one is just being removed
            checkpoints = []
        files = RunFiles(found.folder)
        logs = [{"rank": rank, "bytes": path.stat().st_size} for rank, path in files.find_rank_logs().items()]
        return {
            **page.describe_run(run),
            "checkpoints": checkpoints,
            "logs": logs,
            "notes": [note.en for note in page.describe_notes(run)],
            "spikes": files.read_bad_steps(),
        }

    def compare_runs(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the settings that differ between runs, their final figures, and `evaluations`: results of `eval`.

        Raises:
            KeyError: no listed run has one of these ids.
        """
        entries = [(self._entries[key], self._follow_run(key)) for key in keys if key]
        runs = [read_run(entry.folder, entry.name, followed.rows) for entry, followed in entries]
        results = evaluations.compare_evaluations([run.evaluation for run in runs])
        return {**comparison.compare_runs(runs).as_json(), "evaluations": results}

    def read_config(self, key: str) -> tuple[str, str]:
        """Return the settings of a run as YAML, and its command where a checkpoint names it; empty: unknown.

        Raises:
            KeyError: no listed run has this id.
        """
        entry = self._entries[key]
        commands = [row["command"] for row in self.get_details(key)["checkpoints"] if row.get("command")]
        return read_run(entry.folder, entry.name, MetricsRows()).config, commands[-1] if commands else ""

    def read_log(self, key: str, rank: int) -> str:
        """Return the end of the log of one rank.

        Raises:
            KeyError: no listed run has this id, or it has no such log.
        """
        return RunFiles(self._entries[key].folder).read_log_end(rank)

    def render_report(self, key: str) -> str:
        """Return the report of a run as it is now, as HTML.

        Raises:
            KeyError: no listed run has this id.
        """
        found = self._entries[key]
        return page.render_run_page(found.folder, read_run(found.folder, found.name, self._follow_run(key).rows))

    def _follow_run(self, key: str) -> FollowedMetrics:
        followed = self._open_runs.get(key) or FollowedMetrics(self._entries[key].folder)
        self._open_runs[key] = followed
        self._open_runs.move_to_end(key)
        while len(self._open_runs) > MAX_OPEN_RUNS:
            self._open_runs.popitem(last=False)
        followed.read_new_rows()
        return followed

    def _scan_folders(self) -> None:
        folders = sorted(_find_run_folders(self._root), reverse=True)
        self._num_omitted = max(0, len(folders) - MAX_RUNS)
        found = {}
        for _, folder in folders[:MAX_RUNS]:
            name = str(folder.relative_to(self._root)) if folder != self._root else folder.resolve().name
            key = _make_key(folder)
            try:
                found[key] = self._entries.get(key) or _RunEntry(folder, name, _open_reader(folder))
            except ConfigError:  # it has gone since
                continue
        self._entries = found


def _open_reader(folder: Path) -> RunReader | None:
    return RunReader(folder, rows=20) if RunFiles(folder).has_any(METRICS_FILE, EVENTS_FILE) else None


def _read_change_time(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _describe_evaluation(key: str, entry: _RunEntry, evaluated: float | None) -> dict[str, Any]:
    unknown = dict.fromkeys(("steps", "valid_loss", "step", "loss", "tokens_per_s", "eta_s"))
    age = None if evaluated is None else max(0.0, time.time() - evaluated)
    row = {"id": key, "name": entry.name, "state": "evaluated", "why": "", "age_s": age, "evaluated": evaluated}
    return {**row, **unknown}


def _make_key(folder: Path) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]


def _find_run_folders(root: Path) -> list[tuple[float, Path]]:
    """Return every folder with a run, and when the run wrote last."""
    found = []
    for count, (name, inside, files) in enumerate(os.walk(root)):
        folder = Path(name)
        written = [folder / one for one in _RUN_FILES if one in files]
        times = [path.stat().st_mtime for path in written if path.exists()]
        if times:
            found.append((max(times), folder))
        deep = len(folder.relative_to(root).parts) >= MAX_DEPTH
        inside[:] = [] if deep else [one for one in inside if not one.startswith((".", *_SKIPPED_PREFIXES))]
        if count >= MAX_FOLDERS:
            break
    return found


def _sort_key(row: dict[str, Any]) -> tuple[bool, float, str]:
    runs = row["state"].startswith("running")
    return not runs, 0.0 if runs or row["age_s"] is None else row["age_s"], row["name"]


def _build_curve(name: str, points: Points) -> dict[str, Any]:
    if name == "time":  # Unix time has more digits than are kept
        first = next((value for _, value in points if value is not None), 0.0)
        points = [(step, None if value is None else value - first) for step, value in points]
    curve: dict[str, Any] = {"points": _to_columns(downsample_points(points, MAX_CURVE_POINTS))}
    if name in _SMOOTHED_COLUMNS:
        curve["smooth"] = _to_columns(downsample_points(smooth_points(points), MAX_CURVE_POINTS))
    return curve


def _to_columns(points: Points) -> list[list[float | None]]:
    return [[step for step, _ in points], [None if value is None else float(f"{value:.6g}") for _, value in points]]
