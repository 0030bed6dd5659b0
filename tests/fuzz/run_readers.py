"""Readers of what runs leave behind: metrics, events, manifests, reports, logs of devices."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.evals import answer_cache
from anabatic.monitor import output_formats, run_data, run_lines, screen
from anabatic.monitor import run_reader as monitor_runs
from anabatic.monitor.sampler import Frame
from anabatic.monitor.snapshot import parse_snapshot_row
from anabatic.train.checkpoint import listing, manifest
from anabatic.train.report import page
from fuzz.engine import Good
from fuzz.reading import Reader

TRAIN = [
    {"kind": "train", "step": step, "time": 1.7e9 + step, "loss": 3.0 - step / 10, "lr": 1e-3, "grad_norm": 1.0,
     "tokens": 1000 * step, "tokens_per_s": 5e3, "mfu": 0.4, "memory_bytes": 1e9, "eta_s": 60.0, "data_wait": 0.01,
     "stage": 0, "samples": {"easy": 3, "hard": 4}, "skipped": 0}
    for step in range(1, 8)
]  # fmt: skip
METRICS: list[dict[str, Any]] = [
    *TRAIN,
    {"kind": "eval", "step": 7, "time": 1.7e9 + 8, "valid_loss": 2.2, "valid_bpb": 1.1},
    {"kind": "sample", "step": 7, "prompt": "Once", "text": "upon a time", "reward": 0.5},
]
EVENTS = [
    {"event": "start", "time": 1.7e9, "steps": 8, "devices": 2},
    {"event": "resume", "time": 1.7e9 + 3, "step": 3, "steps": 8},
    {"event": "save", "time": 1.7e9 + 6, "step": 6, "seconds": 0.5},
    {"event": "stop", "time": 1.7e9 + 9, "step": 7},
]
SUMMARY = {
    "finished": True, "steps": 8, "valid_loss": 2.2, "seconds": 60.5, "tokens": 8000, "best": {"step": 7, "value": 2.2},
    "machine": {"devices": ["a"]}, "tasks": {"sums": {"accuracy": 0.5, "chance": 0.1}}, "model": {"params": 1000},
}  # fmt: skip
READING = {
    "source": "npu-smi", "taken_at": 1.7e9, "notes": ["n"], "driver_version": "25.0",
    "devices": [{"npu_id": 0, "chip_id": 0, "kind": "npu", "name": "910B", "health": "OK", "power_w": 90.1,
                 "temperature_c": 40, "aicore_util_pct": 50, "hbm_used_mb": 1000, "hbm_total_mb": 65536}],
    "processes": [{"npu_id": 0, "chip_id": 0, "pid": 12, "name": "python", "mem_mb": 100, "user": "u"}],
}  # fmt: skip


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _run() -> list[Good]:
    return [
        Good("run/metrics.jsonl", _lines(METRICS), "jsonl"),
        Good("run/events.jsonl", _lines(EVENTS), "jsonl"),
        Good("run/summary.json", json.dumps(SUMMARY).encode(), "json"),
        Good("run/config.yaml", b"seed: 1\nmodel: a\neval: {metric: bpb}\nschedule: {max_steps: 8}\n"),
    ]


def watched(path: Path) -> None:
    """Read a run as the monitor does, and draw it."""
    run = monitor_runs.RunReader(path.parent).read()
    run_lines.format_run_lines(run, 100)
    run.get_figures()


def rows(path: Path) -> None:
    """Read the rows of a run as its report does."""
    for row in json_reader.read_json_lines(path):
        json_reader.to_finite_number(row.get("time"))
    read = run_data.read_run(path.parent, "run")
    str(read)


def _report(path: Path) -> None:
    page.write_run_report(path.parent)


def _checkpoint() -> list[Good]:
    state = json.dumps({"step": 3, "data": {}}).encode()
    listed = {"state.json": {"bytes": len(state), "crc32": zlib.crc32(state)}}
    about = {"step": 3, "saved": 1.7e9, "world_size": 2, "strategy": "ddp", "command": "sft", "files": listed}
    return [
        Good("run/checkpoint-3/manifest.json", json.dumps(about).encode(), "json"),
        Good("run/checkpoint-3/state.json", state, "json"),
        Good("run/config.yaml", b"eval: {metric: bpb}\n"),
        Good("run/metrics.jsonl", _lines(METRICS), "jsonl"),
    ]


def checkpoint(path: Path) -> None:
    """List the checkpoints of a run and compare their files."""
    run = next(one for one in path.parents if one.name == "run")
    listing.format_table(listing.list_checkpoints(run))
    listing.verify_checkpoints(run, lambda read: None)
    manifest.find_newest_valid(run)


def _devices(path: Path) -> None:
    for frame in output_formats.read_recording(path):
        show(frame)


def show(frame: Frame) -> None:
    """Everything that is made of a reading."""
    history = screen.UtilizationHistory()
    history.add_frame(frame)
    screen.render_screen(frame, frame.snapshot, history, 100, 40)
    json.dumps([output_formats.frame_to_row(frame, frame.snapshot), output_formats.frame_to_log_row(frame)])
    output_formats.format_csv(frame.snapshot, True)
    output_formats.format_prometheus(frame, {})


def _store(path: Path) -> None:
    kept = answer_cache.AnswerCache(path)
    kept.close()


READERS = [
    Reader("a run that is watched", _run, watched, 300),
    Reader("rows of a run", _run, rows, 200),
    Reader("checkpoints", _checkpoint, checkpoint, 300),
    Reader("readings", lambda: [Good("log.jsonl", _lines([READING] * 3), "jsonl")], _devices, 200),
    Reader("answers that are kept", lambda: [Good("a.jsonl", _lines([{"k": [1.0, 2]}, {"l": "x"}]), "jsonl")], _store),
    Reader("reports", _run, _report, 120),
]
assert parse_snapshot_row(READING) is not None
