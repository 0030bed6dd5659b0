"""A run folder, read when it is asked for, of any size, also half written: one file of it (`RunFiles`), or the run as a
whole (`RunData`), its curves, samples, events, results, and what is wrong with it.

A file that is missing reads as empty, a torn line is skipped, and a link is not followed where its text would be shown:
it may lead to any file of whoever serves the runs.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.config.pipeline import PipelineJob
from anabatic.core import json_reader
from anabatic.core.json_reader import read_json_lines, to_finite_number
from anabatic.core.paths import RunFolder

METRICS_FILE, EVENTS_FILE, CONFIG_FILE, SUMMARY_FILE = "metrics.jsonl", "events.jsonl", "config.yaml", "summary.json"
EVALUATION_FILE = "eval.json"
PIPELINE_FILE = "pipeline.jsonl"
MAX_UNIX_TIME = 253_402_300_799.0
"""End of the year 9999 in Unix time."""
MAX_LOG_BYTES = 64 << 10
"""Of the end of a log."""
MAX_BAD_STEPS, MAX_BAD_ROWS = 200, 50
_RANK_LOG = re.compile(r"rank-(\d+)\.log")
Points = list[tuple[int, float | None]]
"""(step, value) by rising step; None where the value was not finite."""
RunNote = tuple[str, dict[str, str]]
"""A fault of a run: key of a text of the report, and its figures."""
MAX_DRAWN_VALUE = 1e100
"""Of a value that is drawn; sums and spans of larger ones leave the range of floats."""
CURVE_KEYS = {
    "train": (
        *("loss", "lr", "grad_norm", "tokens_per_s", "mfu", "memory_bytes", "data_wait", "tokens", "time"),
        *("accuracy", "rewards/chosen", "rewards/rejected"),
        *("reward", "answer_tokens", "truncated", "logprob_diff", "entropy", "kl"),
        *("device_util_pct_mean", "device_util_pct_min", "device_util_pct_max", "device_power_w_mean"),
        *("rank_compute_s_median", "rank_compute_s_max", "rank_wait_s_median"),
    ),
    "eval": ("valid_loss", "valid_bpb", "valid_perplexity", "valid_accuracy", "valid_reward", "valid_answer_tokens"),
}


class RunFiles(RunFolder):
    """The files of one run folder, or of a pipeline; nothing is kept."""

    def has_any(self, *names: str) -> bool:
        """True when the folder has one of these files."""
        return any((self.root / name).is_file() for name in names)

    def iter_metrics(self, kind: str = "") -> Iterator[dict[str, Any]]:
        """Yield the rows of `metrics.jsonl`, oldest first.

        Args:
            kind: train, eval or sample; empty: all.
        """
        for row in json_reader.read_json_lines(self.metrics):
            if not kind or row.get("kind") == kind:
                yield row

    def read_events(self) -> list[dict[str, Any]]:
        """Return the rows of `events.jsonl`, oldest first."""
        return list(json_reader.read_json_lines(self.events))

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; empty if there is none.

        Raises:
            ValueError: the file is damaged; without a text: it holds another type.
        """
        path = self.root / name
        if not path.is_file():
            return {}
        value = json_reader.loads(path.read_text(encoding="utf-8", errors="replace"))
        if not isinstance(value, dict):
            raise ValueError
        return value

    @property
    def is_finished(self) -> bool:
        """True when the summary says that the run is complete."""
        try:
            return self.summary.is_file() and json_reader.read_json_file(self.summary).get("finished") is True
        except (OSError, ValueError, AttributeError):
            return False

    @property
    def is_locked(self) -> bool:
        """True when a process of this machine holds the folder; taking the lock would be in the way of a start."""
        try:
            inode = (self.root / ".lock").stat().st_ino
            table = Path("/proc/locks").read_text(encoding="utf-8")
        except OSError:
            return False
        return any(
            "FLOCK" in words and words[-3].rpartition(":")[2] == str(inode)
            for line in table.splitlines()
            if len(words := line.split()) > 6
        )

    def read_settings_text(self) -> str:
        """Return the text of `config.yaml`, or of a stage's settings; empty if there is none."""
        for path in (self.config, self.root / "stage.yaml"):
            if path.is_file() and not path.is_symlink():
                return path.read_text(encoding="utf-8", errors="replace")
        return ""

    def read_stage_rows(self) -> list[dict[str, Any]]:
        """Return the rows of a pipeline about its stages, oldest first."""
        rows = json_reader.read_json_lines(self.root / PIPELINE_FILE)
        return [row for row in rows if row.get("event") == "stage"]

    def find_newest_checkpoint(self) -> str:
        """Return the name of the newest checkpoint, whole or not; empty: none."""
        saved = [path.name for path in self.root.glob("checkpoint-*") if path.is_dir()]
        return max(saved, key=lambda name: (len(name), name), default="")

    def find_rank_logs(self) -> dict[int, Path]:
        """Return the log of each rank."""
        found = [(match, path) for path in self.root.iterdir() if (match := _RANK_LOG.fullmatch(path.name))]
        return dict(sorted((int(match[1]), path) for match, path in found if path.is_file() and not path.is_symlink()))

    def read_log_end(self, rank: int) -> str:
        """Return the last lines of the log of one rank.

        Raises:
            KeyError: there is no such log.
        """
        path = self.find_rank_logs()[rank]
        with open(path, "rb") as file:
            start = max(0, path.stat().st_size - MAX_LOG_BYTES)
            file.seek(start)
            text = file.read(MAX_LOG_BYTES).decode("utf-8", "replace")
        return text.partition("\n")[2] if start else text

    def read_bad_steps(self) -> list[dict[str, Any]]:
        """Return the last steps that were spikes or not finite: step, reason, loss, grad_norm, their rows as texts."""
        path = self.root / "bad_steps.jsonl"
        steps: deque[dict[str, Any]] = deque(maxlen=MAX_BAD_STEPS)
        for entry in () if path.is_symlink() else json_reader.read_json_lines(path):
            step = to_finite_number(entry.get("step"))
            if step is not None:
                figures = {name: to_finite_number(entry.get(name)) for name in ("loss", "grad_norm")}
                rows = _list_rows(entry)
                steps.append({"step": step, "reason": str(entry.get("reason", "")), **figures, "rows": rows})
        return list(steps)


def _list_rows(entry: dict[str, Any]) -> list[str]:
    ranks = entry.get("ranks")
    rows = [
        f"{row.get('source')}#{row.get('row')}"
        for rank in (ranks if isinstance(ranks, list) else [])
        if isinstance(rank, dict) and isinstance(rank.get("rows"), list)
        for row in rank["rows"]
        if isinstance(row, dict)
    ]
    return list(dict.fromkeys(rows))[:MAX_BAD_ROWS]


def parse_time(value: object) -> float | None:
    """Return a Unix time that a calendar can show, None for anything else."""
    known = to_finite_number(value)
    return known if known is not None and 0 <= known <= MAX_UNIX_TIME else None


@dataclass
class GeneratedSample:
    """What the model wrote after `prompt` when it had trained `step` steps, and what it got for it."""

    step: int
    prompt: str
    text: str
    reward: float | None = None


@dataclass
class LevelCounts:
    """Where a curriculum stood after `step`: its stage, and the samples of each level drawn so far."""

    step: int
    stage: int
    samples: dict[str, float]


@dataclass
class RunData:
    """One stage folder."""

    name: str
    title: str = ""
    command: str = ""
    state: str = ""
    seconds: float | None = None
    end_time: float | None = None
    curves: dict[str, Points] = field(default_factory=dict)
    samples: list[GeneratedSample] = field(default_factory=list)
    level_counts: list[LevelCounts] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    chat: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""
    notes: list[RunNote] = field(default_factory=list)


class MetricsRows:
    """What `metrics.jsonl` holds, by kind; of a step recorded twice the later row counts."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[int, float | None]] = {}
        self.samples: dict[tuple[int, str], GeneratedSample] = {}
        self.level_counts: dict[int, LevelCounts] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}

    def add_row(self, row: dict[str, Any]) -> None:
        """Add a row; one without a step is skipped."""
        step = to_finite_number(row.get("step"))
        if step is None:
            return
        for key in CURVE_KEYS.get(str(row.get("kind")), ()):
            if key in row:
                self.columns.setdefault(key, {})[int(step)] = _parse_drawable(row[key])
        if row.get("kind") == "train" and (level_counts := _parse_level_counts(int(step), row)):
            self.level_counts[int(step)] = level_counts
        if row.get("kind") == "eval":
            self.evaluations[int(step)] = row
        if row.get("kind") == "sample":
            text, reward = str(row.get("text", "")), to_finite_number(row.get("reward"))
            sample = GeneratedSample(int(step), str(row.get("prompt", "")), text, reward)
            self.samples[sample.step, sample.prompt] = sample

    def sorted_curves(self) -> dict[str, Points]:
        """Return the curves by key."""
        return {key: sorted(points.items()) for key, points in self.columns.items()}


def _parse_level_counts(step: int, row: dict[str, Any]) -> LevelCounts | None:
    stage, counts = to_finite_number(row.get("stage")), row.get("samples")
    if stage is None or not isinstance(counts, dict):
        return None
    known = {str(name): value for name, raw in counts.items() if (value := to_finite_number(raw)) is not None}
    return LevelCounts(step, int(stage), known) if known else None


def _parse_drawable(value: object) -> float | None:
    known = to_finite_number(value)
    return known if known is not None and abs(known) <= MAX_DRAWN_VALUE else None


def smooth_points(points: Points) -> Points:
    """Return the moving average, over about a twentieth of the points and centred, so that it does not lag.

    Near the start the window shrinks evenly on both sides, for there a loss is steep; at the end it is cut
    off. Steps without a value stay without one. Fewer than 12 points are returned as they are.
    """
    if len(points) < 12:
        return points
    half = max(2, len(points) // 40)
    sums, counts = [0.0], [0]
    for _, value in points:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    result: Points = []
    for i, (step, value) in enumerate(points):
        reach = min(half, i)
        first, last = i - reach, min(len(points), i + reach + 1)
        known = counts[last] - counts[first]
        result.append((step, (sums[last] - sums[first]) / known if value is not None else None))
    return result


def downsample_points(points: Points, max_points: int) -> Points:
    """Return about `max_points` points or fewer: of each stretch the first, least, greatest and last, and a gap.

    Unlike averages this keeps every spike and every hole visible.
    """
    if len(points) <= max_points:
        return points
    stretch = math.ceil(len(points) / (max_points / 4))
    kept: Points = []
    for start in range(0, len(points), stretch):
        part = range(start, min(start + stretch, len(points)))
        finite = [i for i in part if points[i][1] is not None]
        keep = {part[0], part[-1]}
        if finite:
            keep |= {
                min(finite, key=lambda i: points[i][1] or 0.0),
                max(finite, key=lambda i: points[i][1] or 0.0),
            }
        if len(finite) < len(part):
            keep.add(next(i for i in part if points[i][1] is None))
        kept.extend(points[i] for i in sorted(keep))
    return kept


def read_run(folder: Path, name: str, rows: MetricsRows | None = None) -> RunData:
    """Read one stage folder; a missing file leaves its part empty, a broken one also leaves a note.

    Args:
        rows: of `metrics.jsonl`, where somebody follows it already.
    """
    files = RunFiles(folder)
    run = RunData(name)
    if rows is None:
        rows = MetricsRows()
        for row in files.iter_metrics():
            rows.add_row(row)
    run.curves = rows.sorted_curves()
    run.samples = sorted(rows.samples.values(), key=lambda sample: sample.step)
    run.level_counts = [rows.level_counts[step] for step in sorted(rows.level_counts)]
    run.events = files.read_events()
    run.summary = _read_noted_object(files, SUMMARY_FILE, run.notes)
    run.evaluation = _read_noted_object(files, EVALUATION_FILE, run.notes)
    run.notes += _list_fault_notes(run.events)
    run.chat = list(read_json_lines(folder / "chat.jsonl"))
    run.config = files.read_settings_text()
    run.seconds = to_finite_number(run.summary.get("seconds"))
    times = [time for event in run.events if (time := parse_time(event.get("time"))) is not None]
    run.end_time = max(times, default=None)
    return run


def _read_noted_object(files: RunFiles, name: str, notes: list[RunNote]) -> dict[str, Any]:
    try:
        return files.read_object(name)
    except ValueError as error:
        key, why = ("left_out", {"why": str(error)}) if str(error) else ("left_out_type", {})
        notes.append((key, {"file": name, **why}))
        return {}


def _list_fault_notes(events: list[dict[str, Any]]) -> list[RunNote]:
    """Return what a page says first: ranks that were still slow at the end, and damaged copies of the weights."""
    slow: dict[str, RunNote] = {}
    notes = []
    for event in events:
        rank, place = str(event.get("rank", "")), f"{event.get('host', '')}, {event.get('device', '')}"
        if event.get("event") == "straggler":
            reason = str(event.get("reason"))
            key = f"note.slow_{reason if reason in ('device', 'data', 'link') else 'device'}"
            slow[rank] = (key, {"rank": rank, "place": place, "step": str(event.get("step", ""))})
        elif event.get("event") == "straggler_over":
            slow.pop(rank, None)
        elif event.get("event") == "corrupt_copy":
            ranks = event.get("ranks")
            names = ", ".join(map(str, ranks)) if isinstance(ranks, list) else ""
            tensor = str(event.get("tensor", ""))
            notes.append(("note.corrupt_copy", {"ranks": names, "tensor": tensor, "step": str(event.get("step", ""))}))
    return [*notes, *slow.values()]


def read_pipeline(out: Path, job: PipelineJob) -> list[RunData]:
    """Read every stage of `job` from `out/<stage>/`, with its state and seconds from `out/pipeline.jsonl`."""
    history: dict[str, list[dict[str, Any]]] = {name: [] for name in job.stages}
    for row in RunFiles(out).read_stage_rows():
        if row.get("stage") in history:
            history[row["stage"]].append(row)
    runs = []
    for name, stage in job.stages.items():
        run = read_run(out / name, name)
        run.title, run.command = stage.title, stage.command
        run.state, seconds, ended = _read_stage_state(history[name])
        run.seconds = run.seconds if seconds is None else seconds
        run.end_time = run.end_time if ended is None else ended
        if run.state == "stale":
            run.notes.append(("stale_note", {}))
        runs.append(run)
    return runs


def _read_stage_state(history: list[dict[str, Any]]) -> tuple[str, float | None, float | None]:
    """Return (state, seconds, time of the end) of a stage.

    Attempts that failed or were interrupted count towards the seconds of the one that finished. `skip` is the
    state of a stage that is done and that the last run of the pipeline found unchanged.
    """
    state, seconds, ended, fresh = "", None, None, True
    for row in history:
        event = str(row.get("state", ""))
        if event == "run" and fresh:
            seconds, fresh = None, False
        if event == "skip" and state not in ("done", "skip"):  # left out on request, which changes nothing
            continue
        if event in ("done", "fail", "interrupted"):
            took = to_finite_number(row.get("seconds"))
            seconds = seconds if took is None else (seconds or 0.0) + took
            ended = parse_time(row.get("time"))
            fresh = event == "done"
        state = event
    return state, seconds, ended
