"""Read what a run left in its folder, of any size, also half written, and the machine and software behind it."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from anabatic import __version__
from anabatic.config.pipeline import PipelineJob
from anabatic.core import json_reader
from anabatic.core.formatting import format_size
from anabatic.core.json_reader import to_finite_number
from anabatic.core.language import LocalizedText
from anabatic.core.paths import RunFolder
from anabatic.train.report.words import as_text, get_text

Points = list[tuple[int, float | None]]
"""(step, value) by rising step; None where the value was not finite."""

MAX_DRAWN_VALUE = 1e100
"""Of a value that is drawn; sums and spans of larger ones leave the range of floats."""
MAX_UNIX_TIME = 253_402_300_799.0
"""End of the year 9999 in Unix time."""

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
    notes: list[LocalizedText] = field(default_factory=list)


def read_run(folder: Path, name: str, rows: MetricsRows | None = None) -> RunData:
    """Read one stage folder; a missing file leaves its part empty, a broken one also leaves a note.

    Args:
        rows: of `metrics.jsonl`, where somebody follows it already.
    """
    paths = RunFolder(folder)
    run = RunData(name)
    if rows is None:
        rows = MetricsRows()
        for row in json_reader.read_json_lines(paths.metrics):
            rows.add_row(row)
    run.curves = rows.sorted_curves()
    run.samples = sorted(rows.samples.values(), key=lambda sample: sample.step)
    run.level_counts = [rows.level_counts[step] for step in sorted(rows.level_counts)]
    run.events = list(json_reader.read_json_lines(paths.events))
    run.summary = _read_json_object(paths.summary, run.notes)
    run.evaluation = _read_json_object(folder / "eval.json", run.notes)
    run.notes += list_fault_notes(run.events)
    run.chat = list(json_reader.read_json_lines(folder / "chat.jsonl"))
    # A link may lead to any file of whoever serves the runs, and text of any kind is shown.
    written = [path for path in (paths.config, folder / "stage.yaml") if path.is_file() and not path.is_symlink()]
    run.config = written[0].read_text(encoding="utf-8", errors="replace") if written else ""
    run.seconds = to_finite_number(run.summary.get("seconds"))
    times = [time for event in run.events if (time := parse_time(event.get("time"))) is not None]
    run.end_time = max(times, default=None)
    return run


def list_fault_notes(events: list[dict[str, Any]]) -> list[LocalizedText]:
    """Return what a page says first: ranks that were still slow at the end, and damaged copies of the weights."""
    slow: dict[str, LocalizedText] = {}
    notes = []
    for event in events:
        rank, place = str(event.get("rank", "")), f"{event.get('host', '')}, {event.get('device', '')}"
        if event.get("event") == "straggler":
            reason = str(event.get("reason"))
            key = f"note.slow_{reason if reason in ('device', 'data', 'link') else 'device'}"
            slow[rank] = get_text(key, rank=rank, place=place, step=str(event.get("step", "")))
        elif event.get("event") == "straggler_over":
            slow.pop(rank, None)
        elif event.get("event") == "corrupt_copy":
            ranks = event.get("ranks")
            names = ", ".join(map(str, ranks)) if isinstance(ranks, list) else ""
            tensor = str(event.get("tensor", ""))
            notes.append(get_text("note.corrupt_copy", ranks=names, tensor=tensor, step=str(event.get("step", ""))))
    return [*notes, *slow.values()]


def read_pipeline(out: Path, job: PipelineJob) -> list[RunData]:
    """Read every stage of `job` from `out/<stage>/`, with its state and seconds from `out/pipeline.jsonl`."""
    history: dict[str, list[dict[str, Any]]] = {name: [] for name in job.stages}
    for row in json_reader.read_json_lines(out / "pipeline.jsonl"):
        if row.get("event") == "stage" and row.get("stage") in history:
            history[row["stage"]].append(row)
    runs = []
    for name, stage in job.stages.items():
        run = read_run(out / name, name)
        run.title, run.command = stage.title, stage.command
        run.state, seconds, ended = _read_stage_state(history[name])
        run.seconds = run.seconds if seconds is None else seconds
        run.end_time = run.end_time if ended is None else ended
        if run.state == "stale":
            run.notes.append(get_text("stale_note"))
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


def parse_time(value: object) -> float | None:
    """Return a Unix time that a calendar can show, None for anything else."""
    known = to_finite_number(value)
    return known if known is not None and 0 <= known <= MAX_UNIX_TIME else None


def _parse_drawable(value: object) -> float | None:
    known = to_finite_number(value)
    return known if known is not None and abs(known) <= MAX_DRAWN_VALUE else None


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


def _read_json_object(path: Path, notes: list[LocalizedText]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json_reader.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        notes.append(get_text("left_out", file=path.name, why=error))
        return {}
    if not isinstance(value, dict):
        notes.append(get_text("left_out_type", file=path.name))
        return {}
    return value


# Names of (implementer, part) that Linux prints as numbers on Arm, as in util-linux's lscpu.
_ARM_CPU_NAMES = {
    ("0x48", "0xd01"): "HiSilicon Kunpeng-920 (TaiShan v110)",
    ("0x48", "0xd02"): "HiSilicon TaiShan v120",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
}


def parse_cpu_name(cpuinfo: str) -> str:
    """Return the processor's name from the text of `/proc/cpuinfo`, else what Python knows of it."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if name := fields.get("model name"):
        return " ".join(name.replace("(R)", "").replace("(TM)", "").split())
    part = (fields.get("CPU implementer", ""), fields.get("CPU part", ""))
    return _ARM_CPU_NAMES.get(part) or platform.processor() or platform.machine() or "unknown"


def describe_cpu() -> LocalizedText:
    """Return the processor and its cores."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    threads = psutil.cpu_count() or 1
    cores = psutil.cpu_count(logical=False) or threads
    key = f"{'cores' if cores > 1 else 'core'}{'_threads' if threads != cores else ''}"
    return get_text(key, name=parse_cpu_name(text), cores=cores, threads=threads)


def describe_memory() -> str:
    """Return the machine's memory."""
    return format_size(psutil.virtual_memory().total)


def list_versions() -> list[tuple[str, str]]:
    """Return (name, version) of Python, torch, transformers, where installed, and anabatic."""
    found = [("Python", platform.python_version())]
    for package in ("torch", "transformers"):
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return [*found, ("anabatic", __version__)]


def find_commit(folder: Path) -> LocalizedText | None:
    """Return the short commit of the git checkout that tracks `folder`, and whether files changed; else None.

    A folder that merely lies inside a checkout, as a virtual environment does, has no commit.
    """
    if not _run_git(folder, "ls-files", "--", "."):
        return None
    short = _run_git(folder, "rev-parse", "--short=10", "HEAD")
    changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    if not short:
        return None
    return get_text("changed", commit=short) if changed else as_text(short)


def _run_git(folder: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a folder on a dead mount
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
