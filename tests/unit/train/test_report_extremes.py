"""Numbers that no chart and no calendar can show: the report, the page of runs and the screen leave them out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.monitor.run_data import CURVE_KEYS, parse_time
from anabatic.monitor.run_lines import format_run_lines
from anabatic.monitor.run_reader import RunReader
from anabatic.train.report.page import write_run_report
from anabatic_studio.run_browser import RunBrowser
from suite.fake_runs import write_jsonl

EXTREME = [1e300, -1e300, 1.7976931348623157e308, 5e-324, 10**30, -(10**30), 10**400, 2**63, 1e18, float("inf")]
SUMMARY = ("seconds", "tokens", "steps", "params", "peak_memory_bytes", "device_util_pct", "train_loss", "valid_loss")


def _write(folder: Path, value: float) -> None:
    rows = [{"kind": "train", "step": step, "loss": 1.0, "time": 1e9 + step} for step in range(1, 6)]
    for kind, names in CURVE_KEYS.items():
        rows += [{"kind": kind, "step": 6 + at, **dict.fromkeys(names, one)} for at, one in enumerate((value, -value))]
    rows += [{"kind": "train", "step": value, "loss": 1.0}, {"kind": "train", "step": 9, "stage": value}]
    rows += [{"kind": "train", "step": 10 + at, "stage": value, "samples": {"a": value, "b": 1}} for at in (0, 1)]
    rows += [{"kind": "sample", "step": value, "prompt": "a", "text": "b", "reward": value}]
    write_jsonl(folder / "metrics.jsonl", rows)
    events = [{"event": "early", "time": value}, {"event": "start", "time": 1e9}, {"event": "late", "time": -value}]
    write_jsonl(folder / "events.jsonl", [*events, {"event": "resume", "time": 1e9, "step": value}])
    (folder / "summary.json").write_text(json.dumps(dict.fromkeys(SUMMARY, value)))
    task = {"accuracy": value, "chance": value, "n": value}
    scores = {"bits_per_byte": {"model": value, "gzip9": value, "bytes": value}, "tasks": {"a": task}}
    (folder / "eval.json").write_text(json.dumps(scores))


@pytest.mark.parametrize("value", EXTREME)
def test_every_field_may_hold_any_number(tmp_path: Path, value: float) -> None:
    run = tmp_path / "run"
    run.mkdir()
    _write(run, value)
    page = write_run_report(run).read_text(encoding="utf-8")
    assert "early" in page and "nan" not in page.lower().split("<script")[0].split()
    runs = RunBrowser(tmp_path)
    (listed,) = runs.list_runs()["runs"]
    for one in (runs.get_curves(listed["id"], ""), runs.get_details(listed["id"]), runs.render_report(listed["id"])):
        assert json.dumps(one)
    assert format_run_lines(RunReader(run).read(), 100)


def test_moments() -> None:
    assert parse_time(1e9) == 1e9
    assert [one for one in (*EXTREME, -1, None, "1", True) if parse_time(one) is not None] == [5e-324]
